"""Linear layers over packed weights: what `linear` multiplies, in the shape of `kernels.Linear`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_service.backends.torch_backend.cpu import jobs as cpu_jobs
from executor_service.backends.torch_backend.cpu.jobs import Job
from executor_service.backends.torch_backend.cpu.pool import Pool
from executor_service.backends.torch_backend.cpu.registers import LANES

_CLAIMS_PER_THREAD = 8  # chunks of a product: enough to even out a thread that is held up


def bias_jobs(bias: torch.Tensor | None, rows: int, out: int, add: bool) -> list[Job]:
    """What comes before a product that is then added to `out`: its bias [n], put or itself added."""
    if bias is None:
        return []
    return [cpu_jobs.by_rows(cpu_jobs.BIAS, rows, bias.data_ptr(), out, len(bias), int(add))]


class PackedLinear:
    """x W^T + b, with W [n, k] given as parts that follow each other in n."""

    def __init__(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, pool: Pool) -> None:
        weight = torch.cat([part.float() for part in parts])
        self._n, self._k = weight.shape
        self._pool, self._panels = pool, _pack(weight)
        self._size = chunk_size(len(self._panels), pool.threads, 4)
        self._chunks = -(-len(self._panels) // self._size)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, k] to [rows, n]; with `add_to` [rows, n] the result is added to it, in place."""
        out = torch.empty(x.shape[0], self._n) if add_to is None else add_to
        self._pool.run(*self.jobs(x.shape[0], x.data_ptr(), out.data_ptr(), add_to is not None))
        return out

    def jobs(self, rows: int, x: int, out: int, add: bool) -> list[Job]:
        """The jobs that compute out = x W^T + b, or out += that with `add`; x and out are addresses."""
        w, bias = self._panels.data_ptr(), self._bias
        put = bias_jobs(bias, rows, out, add)
        added = int(add or bias is not None)
        return [*put, (cpu_jobs.MULTIPLY, self._chunks, rows, x, w, out, self._k, self._n, self._size, added)]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, [ids, k]: an embedding that shares the output layer's weights."""
        return self._panels[ids // LANES, :, ids % LANES]

    def bytes(self) -> int:
        """Memory of the weights."""
        return self._panels.nbytes


class PackedGated:
    """silu(x G^T) * (x U^T): the first half of a SwiGLU MLP (Shazeer 2020)."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, pool: Pool) -> None:
        self.width, self._k = gate.shape
        self._pool = pool
        self._panels = torch.stack([_pack(gate.float()), _pack(up.float())], 1).flatten(0, 1)
        pairs = len(self._panels) // 2
        self._size = chunk_size(pairs, pool.threads, 2)
        self._chunks = -(-pairs // self._size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, k] to [rows, n]."""
        out = torch.empty(x.shape[0], self.width)
        self._pool.run(*self.jobs(x.shape[0], x.data_ptr(), out.data_ptr()))
        return out

    def jobs(self, rows: int, x: int, out: int) -> list[Job]:
        """The jobs that compute it; x and out are addresses."""
        w = self._panels.data_ptr()
        return [(cpu_jobs.GATED, self._chunks, rows, x, w, out, self._k, self.width, self._size)]

    def bytes(self) -> int:
        """Memory of the weights."""
        return self._panels.nbytes


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] to panels [ceil(n / 16), k, 16], filled up with zeros."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -n % LANES))
    packed: torch.Tensor = padded.reshape(-1, LANES, k).transpose(1, 2).contiguous()
    return packed


def chunk_size(panels: int, threads: int, unit: int) -> int:
    """How many panels a claim takes: a multiple of `unit`, a few claims for each thread."""
    if threads == 1:
        return panels
    share = panels // (threads * _CLAIMS_PER_THREAD)
    return max(share - share % unit, unit)
