"""Linear layers over int8 weights: what `int8` multiplies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from executor_service.backends.torch_backend.cpu import int8 as cpu_int8
from executor_service.backends.torch_backend.cpu import jobs as cpu_jobs
from executor_service.backends.torch_backend.cpu.jobs import Job
from executor_service.backends.torch_backend.cpu.pool import Pool
from executor_service.backends.torch_backend.cpu.pooled import (
    PooledGated,
    PooledLinear,
    bias_jobs,
    chunk_size,
)
from executor_service.backends.torch_backend.cpu.registers import LANES
from executor_service.backends.torch_backend.cpu.tile_int8 import LARGEST_WEIGHT, largest_activation

_PACKED_AT_ONCE = 256 * LANES  # columns: packing takes little memory beside the result


class Scratch:
    """Where a product's quantized rows lie; all products of one thread share it."""

    def __init__(self) -> None:
        self._rooms = [np.empty(0, np.uint8)]

    def address(self, rows: int, k: int) -> int:
        """Room for `rows` scales and rows of k int16, whose content lasts until the next product."""
        needed = rows * (4 + 2 * (k + k % 2))
        if needed > len(self._rooms[-1]):
            # Smaller ones stay: tables of jobs hold their addresses. All of them are no more than the last.
            self._rooms.append(np.empty(max(needed, 2 * len(self._rooms[-1])), np.uint8))
        return self._rooms[-1].ctypes.data


class Int8Linear(PooledLinear):
    """x W^T + b, with W [n, k] given as parts that follow each other in n, rounded to int8."""

    def __init__(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, pool: Pool, scratch: Scratch
    ) -> None:
        weight = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        super().__init__(len(weight), pool)
        self._k = weight.shape[1]
        self._scratch, self._largest = scratch, largest_activation(self._k)
        self._panels, self._scales = pack(weight)
        self._size = chunk_size(len(self._panels), pool.threads, 4)
        self._chunks = -(-len(self._panels) // self._size)
        self._bias = None if bias is None else bias.float()

    def jobs(self, rows: int, x: int, out: int, add: bool) -> list[Job]:
        """See `PooledLinear`."""
        quantized = rows, x, self._scratch.address(rows, self._k), self._k, self._largest
        kind = cpu_int8.ADD if add or self._bias is not None else cpu_int8.PUT
        w, scales = self._panels.data_ptr(), self._scales.data_ptr()
        return [
            *bias_jobs(self._bias, rows, out, add),
            cpu_jobs.by_rows(cpu_jobs.QUANTIZE, *quantized),
            (cpu_jobs.INT8_PRODUCT, self._chunks, *quantized, w, scales, out, self._n, self._size, kind),
        ]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W as they were rounded, fp32 [ids, k]."""
        packed = self._panels[ids // LANES, :, ids % LANES].flatten(1)[:, : self._k]
        return packed.float() * self._scales[ids, None]

    def bytes(self) -> int:
        """See `PooledLinear`."""
        return self._panels.nbytes + self._scales.nbytes


class Int8Gated(PooledGated):
    """silu(x G^T) * (x U^T), with G and U rounded to int8."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, pool: Pool, scratch: Scratch) -> None:
        super().__init__(len(gate), pool)
        self._k = gate.shape[1]
        self._scratch, self._largest = scratch, largest_activation(self._k)
        packed = [pack(gate), pack(up)]
        self._panels = torch.stack([panels for panels, _ in packed], 1).flatten(0, 1)
        self._scales = torch.stack([scales.view(-1, LANES) for _, scales in packed], 1).flatten()
        pairs = len(self._panels) // 2
        self._size = chunk_size(pairs, pool.threads, 2)
        self._chunks = -(-pairs // self._size)

    def jobs(self, rows: int, x: int, out: int) -> list[Job]:
        """See `PooledGated`."""
        quantized = rows, x, self._scratch.address(rows, self._k), self._k, self._largest
        w, scales, kind = self._panels.data_ptr(), self._scales.data_ptr(), cpu_int8.GATED
        return [
            cpu_jobs.by_rows(cpu_jobs.QUANTIZE, *quantized),
            (cpu_jobs.INT8_PRODUCT, self._chunks, *quantized, w, scales, out, self.width, self._size, kind),
        ]

    def bytes(self) -> int:
        """See `PooledGated`."""
        return self._panels.nbytes + self._scales.nbytes


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """W [n, k] to int8 panels [ceil(n / 16), ceil(k / 2), 16, 2], filled up with zeros, and scales.

    Each row of W has a scale [panels * 16]: its largest magnitude / 127, or NaN where it is not finite.
    """
    n, k = weight.shape
    panels = torch.empty(-(-n // LANES), -(-k // 2), LANES, 2, dtype=torch.int8)
    scales = torch.empty(len(panels) * LANES)
    for first in range(0, n, _PACKED_AT_ONCE):
        part = weight[first : first + _PACKED_AT_ONCE].float()
        part = torch.nn.functional.pad(part, (0, k % 2, 0, -part.shape[0] % LANES))
        largest = part.abs().amax(1)
        scale = torch.where(largest.isfinite(), largest, torch.nan) / LARGEST_WEIGHT
        rounded = (part / scale[:, None]).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
        at = first // LANES
        pairs = rounded.view(-1, LANES, panels.shape[1], 2).transpose(1, 2)
        panels[at : at + len(pairs)] = pairs
        scales[first : first + len(scale)] = scale
    return panels, scales
