"""Linear layers as jobs of a pool, whatever their weights are: done at once, or put into a table of many."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from executor_service.backends.torch_backend.cpu import jobs as cpu_jobs
from executor_service.backends.torch_backend.cpu.jobs import Job
from executor_service.backends.torch_backend.cpu.pool import Pool

_CLAIMS_PER_THREAD = 8  # chunks of a product: enough to even out a thread that is held up


class PooledLinear(ABC):
    """x W^T + b, as `kernels.Linear`."""

    def __init__(self, n: int, pool: Pool) -> None:
        self._n, self._pool = n, pool

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, k] to [rows, n]; with `add_to` [rows, n] the result is added to it, in place."""
        out = torch.empty(x.shape[0], self._n) if add_to is None else add_to
        self._pool.run(*self.jobs(x.shape[0], x.data_ptr(), out.data_ptr(), add_to is not None))
        return out

    @abstractmethod
    def jobs(self, rows: int, x: int, out: int, add: bool) -> list[Job]:
        """The jobs that compute out = x W^T + b, or out += that with `add`; x and out are addresses."""

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, [ids, k]: an embedding that shares the output layer's weights."""

    @abstractmethod
    def bytes(self) -> int:
        """Memory of the weights."""


class PooledGated(ABC):
    """silu(x G^T) * (x U^T), as `kernels.Gated`: the first half of a SwiGLU MLP (Shazeer 2020)."""

    def __init__(self, width: int, pool: Pool) -> None:
        self.width, self._pool = width, pool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, k] to [rows, n]."""
        out = torch.empty(x.shape[0], self.width)
        self._pool.run(*self.jobs(x.shape[0], x.data_ptr(), out.data_ptr()))
        return out

    @abstractmethod
    def jobs(self, rows: int, x: int, out: int) -> list[Job]:
        """The jobs that compute it; x and out are addresses."""

    @abstractmethod
    def bytes(self) -> int:
        """Memory of the weights."""


def bias_jobs(bias: torch.Tensor | None, rows: int, out: int, add: bool) -> list[Job]:
    """What comes before a product that is then added to `out`: its bias [n], put or itself added."""
    if bias is None:
        return []
    return [cpu_jobs.by_rows(cpu_jobs.BIAS, rows, bias.data_ptr(), out, len(bias), int(add))]


def chunk_size(panels: int, threads: int, unit: int) -> int:
    """How many panels a claim takes: a multiple of `unit`, a few claims for each thread."""
    if threads == 1:
        return panels
    share = panels // (threads * _CLAIMS_PER_THREAD)
    return max(share - share % unit, unit)
