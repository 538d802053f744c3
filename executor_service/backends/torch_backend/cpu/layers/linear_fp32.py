"""Linear layers over fp32 weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_service.backends.torch_backend.cpu.layers.threaded_linear import PooledGated, PooledLinear
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES
from executor_service.backends.torch_backend.cpu.threads import jobs as cpu_jobs
from executor_service.backends.torch_backend.cpu.threads.jobs import Job
from executor_service.backends.torch_backend.cpu.threads.thread_pool import Pool


class PackedLinear(PooledLinear):
    """x W^T + b, with W [n, k] given as parts that follow each other in n."""

    def __init__(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, pool: Pool) -> None:
        weight = torch.cat([part.float() for part in parts])
        super().__init__(len(weight), _pack(weight), bias, pool)
        self._k = weight.shape[1]

    def jobs(self, rows: int, x: int, out: int, add: bool) -> list[Job]:
        """See `PooledLinear`."""
        return self._product(cpu_jobs.MULTIPLY, (rows, x, 4 * self._k), self._k, out, add)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See `PooledLinear`."""
        return self._panels[ids // LANES, :, ids % LANES]


class PackedGated(PooledGated):
    """silu(x G^T) * (x U^T)."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, pool: Pool) -> None:
        super().__init__(len(gate), _pack(gate.float()), _pack(up.float()), pool)
        self._k = gate.shape[1]

    def jobs(self, rows: int, x: int, out: int) -> list[Job]:
        """See `PooledGated`."""
        return [self._product(cpu_jobs.GATED, (rows, x, 4 * self._k), self._k, out)]


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] to panels [ceil(n / 16), k, 16], filled up with zeros."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -n % LANES))
    packed: torch.Tensor = padded.reshape(-1, LANES, k).transpose(1, 2).contiguous()
    return packed
