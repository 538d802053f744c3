"""Linear layers over int8 weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

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
from executor_service.backends.torch_backend.cpu.tile_int8 import (
    LARGEST_WEIGHT,
    PANEL_ROW_BYTES,
    PANEL_SCALE_BYTES,
    ROW_SCALE_BYTES,
    largest_activation,
)

_PACKED_AT_ONCE = 256 * LANES  # columns: packing takes little memory beside the result


class Scratch:
    """Where a product's quantized rows lie; all products of one thread share it."""

    def __init__(self) -> None:
        self._rooms = [np.empty(0, np.uint8)]

    def address(self, size: int) -> int:
        """Room for so many bytes, which last until the next product."""
        if size > len(self._rooms[-1]):
            # Smaller ones stay: tables of jobs hold their addresses. All of them are no more than the last.
            self._rooms.append(np.empty(max(size, 2 * len(self._rooms[-1])), np.uint8))
        return self._rooms[-1].ctypes.data


class _Rows:
    """How rows of k numbers are quantized and where they lie then."""

    def __init__(self, k: int, scratch: Scratch) -> None:
        self._k, self._scratch, self._largest = k, scratch, largest_activation(k)
        self._stride = ROW_SCALE_BYTES + 2 * (k + k % 2)

    def job(self, rows: int, x: int) -> Job:
        """The job that quantizes rows."""
        to = self._scratch.address(rows * self._stride)
        return cpu_jobs.by_rows(cpu_jobs.QUANTIZE, rows, x, to, self._stride, self._k, self._largest)

    def factor(self, rows: int) -> tuple[int, int, int]:
        """What a product knows of them then: rows, address, and bytes from row to row."""
        return rows, self._scratch.address(rows * self._stride) + ROW_SCALE_BYTES, self._stride


class Int8Linear(PooledLinear):
    """x W^T + b, with W [n, k] given as parts that follow each other in n, rounded to int8."""

    def __init__(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, pool: Pool, scratch: Scratch
    ) -> None:
        weight = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        super().__init__(len(weight), pool)
        self._k = weight.shape[1]
        self._rows, self._panels = _Rows(self._k, scratch), pack(weight)
        self._size = chunk_size(len(self._panels), pool.threads, 4)
        self._chunks = -(-len(self._panels) // self._size)
        self._bias = None if bias is None else bias.float()

    def jobs(self, rows: int, x: int, out: int, add: bool) -> list[Job]:
        """See `PooledLinear`."""
        w = self._panels.data_ptr(), self._panels.shape[1], -(-self._k // 2)
        added = int(add or self._bias is not None)
        product = *self._rows.factor(rows), *w, out, self._n, self._size, added
        return [
            *bias_jobs(self._bias, rows, out, add),
            self._rows.job(rows, x),
            (cpu_jobs.MULTIPLY_INT8, self._chunks, *product),
        ]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W as they were rounded, fp32 [ids, k]."""
        weights, scales = unpack(self._panels)
        rounded = weights[ids // LANES, :, ids % LANES].flatten(1)[:, : self._k]
        return rounded.float() * scales[ids // LANES, ids % LANES, None]

    def bytes(self) -> int:
        """See `PooledLinear`."""
        return self._panels.nbytes


class Int8Gated(PooledGated):
    """silu(x G^T) * (x U^T), with G and U rounded to int8."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, pool: Pool, scratch: Scratch) -> None:
        super().__init__(len(gate), pool)
        self._pairs = -(-gate.shape[1] // 2)
        self._rows = _Rows(gate.shape[1], scratch)
        self._panels = torch.stack([pack(gate), pack(up)], 1).flatten(0, 1)
        both = len(self._panels) // 2
        self._size = chunk_size(both, pool.threads, 2)
        self._chunks = -(-both // self._size)

    def jobs(self, rows: int, x: int, out: int) -> list[Job]:
        """See `PooledGated`."""
        w = self._panels.data_ptr(), self._panels.shape[1], self._pairs
        product = *self._rows.factor(rows), *w, out, self.width, self._size
        return [self._rows.job(rows, x), (cpu_jobs.GATED_INT8, self._chunks, *product)]

    def bytes(self) -> int:
        """See `PooledGated`."""
        return self._panels.nbytes


def pack(weight: torch.Tensor) -> torch.Tensor:
    """W [n, k] to panels, bytes [ceil(n / 16), ...]: int8 [ceil(k / 2), 16, 2], then 16 scales in fp32.

    What is missing in the last ones is zero. Each row of W has a scale: its largest magnitude / 127, or NaN
    where it is not finite.
    """
    n, k = weight.shape
    pairs = -(-k // 2)
    panels = torch.empty(-(-n // LANES), pairs * PANEL_ROW_BYTES + PANEL_SCALE_BYTES, dtype=torch.uint8)
    weights, scales = unpack(panels)
    for first in range(0, n, _PACKED_AT_ONCE):
        part = weight[first : first + _PACKED_AT_ONCE].float()
        part = torch.nn.functional.pad(part, (0, k % 2, 0, -part.shape[0] % LANES))
        largest = part.abs().amax(1)
        scale = torch.where(largest.isfinite(), largest, torch.nan) / LARGEST_WEIGHT
        rounded = (part / scale[:, None]).round_().nan_to_num_(0.0, 0.0, 0.0)
        rounded = rounded.clamp_(-LARGEST_WEIGHT, LARGEST_WEIGHT).to(torch.int8)  # scales may be denormal
        some = slice(first // LANES, first // LANES + len(part) // LANES)
        weights[some] = rounded.view(-1, LANES, pairs, 2).transpose(1, 2)
        scales[some] = scale.view(-1, LANES)
    return panels


def unpack(panels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of what `pack` made: int8 [panels, ceil(k / 2), 16, 2] and scales fp32 [panels, 16]."""
    weights, scales = panels[:, :-PANEL_SCALE_BYTES], panels[:, -PANEL_SCALE_BYTES:]
    pairs = weights.shape[1] // PANEL_ROW_BYTES
    return weights.view(torch.int8).view(-1, pairs, LANES, 2), scales.view(torch.float32)
