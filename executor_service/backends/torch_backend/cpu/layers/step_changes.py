"""`CpuLowRank`: adapters for the linear layers of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from executor_service.backends.torch_backend.cpu.gemm.low_rank import (
    CHANGE_BYTES,
    SHRINK_ROWS_FP16,
    SHRINK_ROWS_FP32,
    SHRUNK_BYTES,
    Groups,
    LowRank,
)
from executor_service.backends.torch_backend.cpu.layers.packed_adapter import (
    PackedAdapter,
    pack_adapter,
    packed_bytes,
)
from executor_service.backends.torch_backend.cpu.layers.threaded_linear import NO_GROUPS, RowChanges, Scratch
from executor_service.backends.torch_backend.cpu.primitives.records import Address, address_of
from executor_service.backends.torch_backend.cpu.primitives.registers import MAX_ROWS
from executor_service.backends.torch_backend.cpu.threads.dispatch import require
from executor_service.backends.torch_backend.ops.low_rank import (
    PART_NAMES,
    STACKS,
    AdaptedRows,
    AdapterShape,
    LayerChanges,
    PartFactors,
)


class CpuLowRank:
    """`LowRankKernels`, with factors in fp32 or fp16; everything else is fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._scratch = Scratch()

    def bytes(self, shape: AdapterShape) -> int:
        return packed_bytes(shape, self._dtype)

    def pack(self, shape: AdapterShape, scale: float, factors: Iterable[PartFactors]) -> PackedAdapter:
        require(SHRINK_ROWS_FP16 if self._dtype == torch.float16 else SHRINK_ROWS_FP32)  # not in a step
        return pack_adapter(shape, scale, factors, self._dtype)

    def step(self, rows: Sequence[AdaptedRows], tokens: int) -> CpuStepChanges:
        return CpuStepChanges(rows, self.shrunk(tokens))

    def shrunk(self, tokens: int) -> Address:
        """Memory for what products leave to each other; a step's is valid until the next step."""
        return self._scratch.address(tokens * SHRUNK_BYTES)


class CpuStepChanges:
    """`StepChanges`: the step's groups of rows, none of which is higher than a tile."""

    def __init__(self, rows: Sequence[AdaptedRows], shrunk: Address) -> None:
        groups = [(one.adapter, *cut) for one in rows for cut in _tiles(one.first, one.tokens)]
        adapters, firsts, counts = zip(*groups, strict=True)
        addresses = np.array([address_of(adapter.changes) for adapter in adapters], np.int64)
        places = np.array([firsts, counts], np.int32)
        self.groups = Groups(len(groups), address_of(addresses), address_of(places[0]), address_of(places[1]))
        self._shrunk, self._keep = shrunk, (rows, addresses, places)

    def of_layer(self, layer: int) -> LayerChanges:
        return layer_changes(layer, self.groups, self._shrunk, self)


def layer_changes(layer: int, groups: Groups, shrunk: Address, keep: object = None) -> LayerChanges:
    """For each linear layer of a block, the `RowChanges` of these groups."""
    entry, changes = layer * len(PART_NAMES) * CHANGE_BYTES, []
    for names in STACKS.values():
        changes.append(RowChanges(groups, LowRank(entry, len(names), shrunk), keep))
        entry += len(names) * CHANGE_BYTES
    return LayerChanges(*changes)


def recorded_changes(layer: int, shrunk: Address) -> LayerChanges:
    """The same for recorded calls, in which each step sets the groups."""
    return layer_changes(layer, NO_GROUPS, shrunk)


def _tiles(first: int, count: int) -> Iterator[tuple[int, int]]:
    """First rows and numbers of rows: as few tiles as possible, of about equal size."""
    tiles = -(-count // MAX_ROWS)
    bounds = [first + i * count // tiles for i in range(tiles + 1)]
    for begin, end in pairwise(bounds):
        yield begin, end - begin
