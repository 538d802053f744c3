"""Linear layers as jobs of a pool, whatever their weights are: done at once, or put into a table of many."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from executor_service.backends.torch_backend.cpu.threads import jobs as cpu_jobs
from executor_service.backends.torch_backend.cpu.threads.jobs import Job
from executor_service.backends.torch_backend.cpu.threads.thread_pool import Pool

Factor = tuple[int, int, int]
"""X of a product: how many rows, their address, and the bytes from row to row."""

_CLAIMS_PER_THREAD = 8  # chunks of a product: enough to even out a thread that is held up


class PooledLinear(ABC):
    """x W^T + b, as `kernels.Linear`, with W [n, k] packed into panels, the first dimension of a tensor."""

    def __init__(self, n: int, panels: torch.Tensor, bias: torch.Tensor | None, pool: Pool) -> None:
        self._n, self._panels, self._pool = n, panels, pool
        self._size = _chunk_size(len(panels), pool.threads, 4)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, k] to [rows, n]; with `add_to` [rows, n] the result is added to it, in place."""
        out = torch.empty(x.shape[0], self._n) if add_to is None else add_to
        self._pool.run(*self.jobs(x.shape[0], x.data_ptr(), out.data_ptr(), add_to is not None))
        return out

    def bytes(self) -> int:
        """Memory of the weights."""
        return self._panels.nbytes

    @abstractmethod
    def jobs(self, rows: int, x: int, out: int, add: bool) -> list[Job]:
        """The jobs that compute out = x W^T + b, or out += that with `add`; x and out are addresses."""

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, [ids, k]: an embedding that shares the output layer's weights."""

    def _product(self, kind: int, x: Factor, steps: int, out: int, add: bool) -> list[Job]:
        """The product, of a kind of `linear.multiply_chunk`, behind the bias that it is added to."""
        rows, bias = x[0], self._bias
        w = self._panels.data_ptr(), self._panels[0].nbytes
        chunks, added = -(-len(self._panels) // self._size), int(add or bias is not None)
        product = kind, chunks, *x, *w, steps, out, self._n, self._size, added
        if bias is None:
            return [product]
        return [cpu_jobs.by_rows(cpu_jobs.BIAS, rows, bias.data_ptr(), out, len(bias), int(add)), product]


class PooledGated(ABC):
    """silu(x G^T) * (x U^T), as `kernels.Gated`: the first half of a SwiGLU MLP (Shazeer 2020).

    The panels of G and U [width, k] take turns.
    """

    def __init__(self, width: int, gate: torch.Tensor, up: torch.Tensor, pool: Pool) -> None:
        self.width, self._pool = width, pool
        self._panels = torch.stack([gate, up], 1).flatten(0, 1)
        self._size = _chunk_size(len(gate), pool.threads, 2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, k] to [rows, n]."""
        out = torch.empty(x.shape[0], self.width)
        self._pool.run(*self.jobs(x.shape[0], x.data_ptr(), out.data_ptr()))
        return out

    def bytes(self) -> int:
        """Memory of the weights."""
        return self._panels.nbytes

    @abstractmethod
    def jobs(self, rows: int, x: int, out: int) -> list[Job]:
        """The jobs that compute it; x and out are addresses."""

    def _product(self, kind: int, x: Factor, steps: int, out: int) -> Job:
        """The product itself, of a kind of `linear.gated_chunk`."""
        w = self._panels.data_ptr(), self._panels[0].nbytes
        chunks = -(-(len(self._panels) // 2) // self._size)
        return kind, chunks, *x, *w, steps, out, self.width, self._size


def _chunk_size(panels: int, threads: int, unit: int) -> int:
    """How many panels a claim takes: a multiple of `unit`, a few claims for each thread."""
    if threads == 1:
        return panels
    share = panels // (threads * _CLAIMS_PER_THREAD)
    return max(share - share % unit, unit)
