"""Linear layers as calls of a thread pool: made at once, or recorded in a table of many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from executor_service.backends.torch_backend.cpu.gemm.bias import AddBias
from executor_service.backends.torch_backend.cpu.gemm.low_rank import Groups, LowRank, ShrinkRows
from executor_service.backends.torch_backend.cpu.gemm.products import Multiply, MultiplyGated
from executor_service.backends.torch_backend.cpu.primitives.records import Address, Record, address_of
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool
from executor_service.backends.torch_backend.files.architecture.activation import Activation

_CHUNKS_PER_THREAD = 8  # of a product: so that other threads take over the work of a delayed one


class Operand(NamedTuple):
    """X of a product, in the layout of its arithmetic."""

    rows: int
    address: Address
    stride: int  # bytes from row to row
    steps: int  # along K


class RowChanges(NamedTuple):
    """What adapters change in a linear layer's results."""

    groups: Groups
    low_rank: LowRank
    keep: object = None  # has the arrays whose addresses are in the records

    def shrink(self, kind: type[ShrinkRows], x: Address, k: int) -> list[Record]:
        """The call that comes before the product of x [rows, k], if there are changes."""
        return [kind(x, k, self.groups, self.low_rank)] if self.low_rank.parts else []


_NOWHERE = Address(0)
NO_GROUPS = Groups(0, _NOWHERE, _NOWHERE, _NOWHERE)
NO_ROW_CHANGES = RowChanges(NO_GROUPS, LowRank(0, 0, _NOWHERE))


class ThreadedLinear(ABC):
    """x W^T + b, as `kernels.Linear`, with W [n, k] packed into a tensor [panels, ...]."""

    def __init__(self, n: int, panels: torch.Tensor, bias: torch.Tensor | None, pool: ThreadPool) -> None:
        self.width, self._panels, self._pool = n, panels, pool
        self._panels_per_chunk = _chunk_size(len(panels), pool.threads, 4)
        self._bias = None if bias is None else bias.float()

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, change: RowChanges | None = None
    ) -> torch.Tensor:
        """[rows, k] to [rows, n]; with `add_to` [rows, n] the result is added to it, in place."""
        out = torch.empty(x.shape[0], self.width) if add_to is None else add_to
        add, change = add_to is not None, change or NO_ROW_CHANGES
        self._pool.run(*self.calls(x.shape[0], address_of(x), address_of(out), add, change))
        return out

    def bytes(self) -> int:
        """Bytes of the weights."""
        return self._panels.nbytes

    @abstractmethod
    def calls(
        self, rows: int, x: Address, out: Address, add: bool, change: RowChanges = NO_ROW_CHANGES
    ) -> list[Record]:
        """The calls that compute out = x W^T + b and its changes, or out += that with `add`."""

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, [ids, k]: an embedding that shares the output layer's weights."""

    def _product(
        self, kind: type[Multiply], x: Operand, out: Address, add: bool, change: RowChanges
    ) -> list[Record]:
        """The calls of the product: the bias first, if there is one, to which the product is added."""
        bias = self._bias
        product = kind(
            rows=x.rows,
            x=x.address,
            x_stride=x.stride,
            w=address_of(self._panels),
            w_stride=self._panels[0].nbytes,
            steps=x.steps,
            out=out,
            n=self.width,
            panels_per_chunk=self._panels_per_chunk,
            add=add or bias is not None,
            groups=change.groups,
            low_rank=change.low_rank,
        )
        if bias is None:
            return [product]
        return [AddBias(rows=x.rows, bias=address_of(bias), out=out, n=len(bias), add=add), product]


class ThreadedGated(ABC):
    """activation(x G^T) * (x U^T), as `kernels.GatedLinear`: the first half of a gated MLP (Shazeer 2020).

    The panels of G and U [width, k] alternate.
    """

    def __init__(
        self, width: int, gate: torch.Tensor, up: torch.Tensor, activation: Activation, pool: ThreadPool
    ) -> None:
        self.width, self._activation, self._pool = width, activation, pool
        self._panels = torch.stack([gate, up], 1).flatten(0, 1)
        self._pairs_per_chunk = _chunk_size(len(gate), pool.threads, 2)

    def __call__(self, x: torch.Tensor, change: RowChanges | None = None) -> torch.Tensor:
        """[rows, k] to [rows, n]."""
        out = torch.empty(x.shape[0], self.width)
        self._pool.run(*self.calls(x.shape[0], address_of(x), address_of(out), change or NO_ROW_CHANGES))
        return out

    def bytes(self) -> int:
        """Bytes of the weights."""
        return self._panels.nbytes

    @abstractmethod
    def calls(self, rows: int, x: Address, out: Address, change: RowChanges = NO_ROW_CHANGES) -> list[Record]:
        """The calls that compute out [rows, width]."""

    def _product(self, kind: type[MultiplyGated], x: Operand, out: Address, change: RowChanges) -> Record:
        """The call of the product."""
        return kind(
            rows=x.rows,
            x=x.address,
            x_stride=x.stride,
            w=address_of(self._panels),
            w_stride=self._panels[0].nbytes,
            steps=x.steps,
            out=out,
            n=self.width,
            pairs_per_chunk=self._pairs_per_chunk,
            activation=int(self._activation),
            groups=change.groups,
            low_rank=change.low_rank,
        )


def _chunk_size(panels: int, threads: int, unit: int) -> int:
    """Panels (or pairs of panels) per chunk: a multiple of `unit`, for some chunks per thread."""
    if threads == 1:
        return panels
    share = panels // (threads * _CHUNKS_PER_THREAD)
    return max(share - share % unit, unit)


class Scratch:
    """Memory that all products of one thread use, one after the other."""

    def __init__(self) -> None:
        self._buffers = [np.empty(0, np.uint8)]

    def address(self, size: int) -> Address:
        """The address of `size` bytes, which are valid until they are asked for again."""
        if size > len(self._buffers[-1]):
            # Smaller buffers stay, because recorded calls hold their addresses. Together they are smaller
            # than the new one.
            self._buffers.append(np.empty(max(size, 2 * len(self._buffers[-1])), np.uint8))
        return address_of(self._buffers[-1])
