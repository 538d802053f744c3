"""Linear layers over packed fp32 weights: what `linear` multiplies."""

from __future__ import annotations

from collections.abc import Sequence

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


class PackedLinear(PooledLinear):
    """x W^T + b, with W [n, k] given as parts that follow each other in n."""

    def __init__(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, pool: Pool) -> None:
        weight = torch.cat([part.float() for part in parts])
        super().__init__(len(weight), pool)
        self._k, self._panels = weight.shape[1], _pack(weight)
        self._size = chunk_size(len(self._panels), pool.threads, 4)
        self._chunks = -(-len(self._panels) // self._size)
        self._bias = None if bias is None else bias.float()

    def jobs(self, rows: int, x: int, out: int, add: bool) -> list[Job]:
        """See `PooledLinear`."""
        w, bias = self._panels.data_ptr(), self._bias
        put = bias_jobs(bias, rows, out, add)
        added = int(add or bias is not None)
        k, stride = self._k, self._panels[0].nbytes
        product = rows, x, 4 * k, w, stride, k, out, self._n, self._size, added
        return [*put, (cpu_jobs.MULTIPLY, self._chunks, *product)]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See `PooledLinear`."""
        return self._panels[ids // LANES, :, ids % LANES]

    def bytes(self) -> int:
        """See `PooledLinear`."""
        return self._panels.nbytes


class PackedGated(PooledGated):
    """silu(x G^T) * (x U^T), with the panels of G and U taking turns."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, pool: Pool) -> None:
        super().__init__(len(gate), pool)
        self._k = gate.shape[1]
        self._panels = torch.stack([_pack(gate.float()), _pack(up.float())], 1).flatten(0, 1)
        pairs = len(self._panels) // 2
        self._size = chunk_size(pairs, pool.threads, 2)
        self._chunks = -(-pairs // self._size)

    def jobs(self, rows: int, x: int, out: int) -> list[Job]:
        """See `PooledGated`."""
        k, w, stride = self._k, self._panels.data_ptr(), self._panels[0].nbytes
        return [(cpu_jobs.GATED, self._chunks, rows, x, 4 * k, w, stride, k, out, self.width, self._size)]

    def bytes(self) -> int:
        """See `PooledGated`."""
        return self._panels.nbytes


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] to panels [ceil(n / 16), k, 16], filled up with zeros."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -n % LANES))
    packed: torch.Tensor = padded.reshape(-1, LANES, k).transpose(1, 2).contiguous()
    return packed
