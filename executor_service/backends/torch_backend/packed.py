"""Linear layers over packed weights: what `cpu_linear` multiplies, in the shape of `kernels.Linear`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_service.backends.torch_backend import cpu_jobs
from executor_service.backends.torch_backend.cpu_pool import Pool
from executor_service.backends.torch_backend.tile import LANES

_CLAIMS_PER_THREAD = 8  # chunks of a product: enough to even out a thread that is held up


def plus_bias(bias: torch.Tensor | None, rows: int, add_to: torch.Tensor | None) -> torch.Tensor | None:
    """What a product of `rows` rows is added to, the bias [n] included; None: nothing, it is put."""
    if bias is None:
        return add_to
    return bias.repeat(rows, 1) if add_to is None else add_to.add_(bias)


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
        add_to = plus_bias(self._bias, x.shape[0], add_to)
        rows, add = x.shape[0], add_to is not None
        out = torch.empty(rows, self._n) if add_to is None else add_to
        self._pool.run(
            cpu_jobs.MULTIPLY, self._chunks, x.data_ptr(), self._panels.data_ptr(), out.data_ptr(),
            rows, self._k, self._n, self._size, int(add),
        )  # fmt: skip
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, [ids, k]: an embedding that shares the output layer's weights."""
        return self._panels[ids // LANES, :, ids % LANES]

    def bytes(self) -> int:
        """Memory of the weights."""
        return self._panels.nbytes


class PackedGated:
    """silu(x G^T) * (x U^T): the first half of a SwiGLU MLP (Shazeer 2020)."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, pool: Pool) -> None:
        self._n, self._k = gate.shape
        self._pool = pool
        self._panels = torch.stack([_pack(gate.float()), _pack(up.float())], 1).flatten(0, 1)
        pairs = len(self._panels) // 2
        self._size = chunk_size(pairs, pool.threads, 2)
        self._chunks = -(-pairs // self._size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, k] to [rows, n]."""
        rows = x.shape[0]
        out = torch.empty(rows, self._n)
        self._pool.run(
            cpu_jobs.GATED, self._chunks, x.data_ptr(), self._panels.data_ptr(), out.data_ptr(),
            rows, self._k, self._n, self._size,
        )  # fmt: skip
        return out

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
