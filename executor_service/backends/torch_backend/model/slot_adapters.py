"""`SlotAdapters`: the adapters in the slots of a model, and which tokens of a step they change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from executor_service.adapters.weights import AdapterWeights, LinearKey, as_float32
from executor_service.backends.base import ForwardRow
from executor_service.backends.torch_backend.files.architecture.families import FAMILIES
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.scaled_numbers import plain
from executor_service.backends.torch_backend.files.stored_names import halves_first
from executor_service.backends.torch_backend.model.shard import Shard
from executor_service.backends.torch_backend.ops.low_rank import (
    AdaptedRows,
    AdapterShape,
    LowRankKernels,
    PartFactors,
    StepChanges,
    parts_of,
)


class SlotAdapters:
    """For one rank's part of a model. All methods but `bytes` and `pack`: the device thread."""

    def __init__(self, spec: ModelSpec, kernels: LowRankKernels, shard: Shard) -> None:
        """`spec`: of this rank's part."""
        self._spec, self._layers, self._parts = spec, spec.layers, parts_of(spec)
        self._pairs = FAMILIES[spec.architecture].pairs  # of directories, which adapters are trained with
        self._kernels, self._shard = kernels, shard
        self._slots: dict[int, Any] = {}

    def reserve(self, count: int) -> None:
        """Have slots 0 to count - 1, before any step: on the host, nothing has to be prepared."""

    def bytes(self, rank: int, changed: Iterable[LinearKey], stored: int) -> int:
        """Bytes of memory that a packed adapter takes, as `AdapterTarget.held`."""
        return self._kernels.bytes(self._shape(rank, changed))

    def pack(self, weights: AdapterWeights) -> Any:
        """This rank's part of an adapter, for its kernels. Raises ModelError."""
        shape = self._shape(weights.rank, weights.keys)
        with torch.inference_mode():
            return self._kernels.pack(shape, weights.scale, self._factors(weights))

    def load(self, slot: int, packed: Any) -> None:
        """Bring an adapter to a slot: on the host, where it was packed, nothing is copied."""
        self._slots[slot] = packed

    def unload(self, slot: int) -> None:
        """Forget what is in a slot."""
        del self._slots[slot]

    def changes(self, rows: Sequence[ForwardRow]) -> StepChanges | None:
        """What adapters change in a step, whose rows are in the order of `by_slot`; None: nothing."""
        adapted, first = [], 0
        for slot, group in groupby(rows, lambda row: row.slot):
            count = sum(len(row.tokens) for row in group)
            if slot >= 0:
                adapted.append(AdaptedRows(self._slots[slot], first, count))
            first += count
        return self._kernels.step(adapted, first) if adapted else None

    def _shape(self, rank: int, changed: Iterable[LinearKey]) -> AdapterShape:
        return AdapterShape(self._layers, rank, [self._parts[key] for key in changed])

    def _factors(self, weights: AdapterWeights) -> Iterator[PartFactors]:
        """One after the other, since they are larger here than where they are stored."""
        for change in weights.changes:
            a, b = (torch.from_numpy(as_float32(factor)) for factor in (change.a, change.b))
            if self._pairs and change.module in ("q_proj", "k_proj"):
                b = plain(halves_first(b, self._spec.head_dim, self._spec.rotary_dim))
            a, b = self._shard.cut_factors(change.layer, change.module, a, b)
            yield PartFactors(self._parts[change.layer, change.module], a, b)


def by_slot(rows: Sequence[ForwardRow]) -> list[int] | None:
    """The indices of the rows in an order in which those of one slot follow each other; None: as they are."""
    if all(row.slot < 0 for row in rows):
        return None
    return sorted(range(len(rows)), key=lambda index: rows[index].slot)
