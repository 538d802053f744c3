"""`CudaLowRank`: adapters in device memory, and `DeviceSlots`, the table that kernels find them in.

An adapter is copied to the device when it is loaded, by the thread that reads it, on a stream of its own, and
is complete before a slot can name it. So a slot is given to an adapter by writing its addresses to the table,
which takes microseconds of the device's time, and no step waits for a copy.

The memory is taken from the stream of the steps: what an unloaded adapter leaves is used again by that stream
after the steps that may still read it, and by another adapter's copies once these steps are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import AdaptedTokens, tile_tokens
from executor_service.backends.torch_backend.cuda.linear.low_rank import (
    RANK_TILE,
    RECORD_FIELDS,
    TableChanges,
)
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.model.shard import Shard
from executor_service.backends.torch_backend.model.slot_adapters import SlotAdapters
from executor_service.backends.torch_backend.ops.low_rank import (
    PART_NAMES,
    AdaptedRows,
    AdapterShape,
    LinearPart,
    LowRankKernels,
    PartFactors,
)

_ALIGNMENT = 16  # bytes: of each factor's address


@dataclass(frozen=True, slots=True)
class DeviceAdapter:
    """A packed adapter."""

    factors: torch.Tensor  # bytes
    records: torch.Tensor  # int64 [layers * PART_NAMES, RECORD_FIELDS]: with addresses in `factors`

    @property
    def bytes(self) -> int:
        """Device memory of both."""
        return self.factors.nbytes + self.records.nbytes


class CudaLowRank:
    """`LowRankKernels`, with factors in the dtype of the activations; all sums are fp32."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._stream: torch.cuda.Stream | None = None  # of the copies; made by the first one

    def bytes(self, shape: AdapterShape) -> int:
        records = 8 * shape.layers * len(PART_NAMES) * RECORD_FIELDS
        return records + sum(sum(self._sizes(part, shape.rank)) for part in shape.parts)

    def pack(self, shape: AdapterShape, scale: float, factors: Iterable[PartFactors]) -> DeviceAdapter:
        """As `LowRankKernels.pack`; returns when the adapter is on the device.

        Raises ModelError where the dtype is too narrow for a factor, and where the device has no memory left.
        """
        sizes = [size for part in shape.parts for size in self._sizes(part, shape.rank)]
        records = np.zeros((shape.layers * len(PART_NAMES), RECORD_FIELDS), np.int64)
        bits = int(torch.tensor(scale, dtype=torch.float64).float().view(torch.int32))
        try:
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            with self._copying():
                places = iter(torch.split(memory, sizes))
                for one in factors:
                    part, addresses = one.part, [_put(f, next(places)) for f in self._padded(one)]
                    fields = *addresses, _padded_rank(shape.rank), bits, part.first, part.outputs
                    number = part.layer * len(PART_NAMES) + PART_NAMES.index(part.name)
                    records[number, : len(fields)] = fields
                return DeviceAdapter(memory, torch.from_numpy(records).to(self._device))
        except torch.OutOfMemoryError:
            raise ModelError(f"the device has no {sum(sizes)} bytes left for the adapter") from None

    def step(self, rows: Sequence[AdaptedRows], tokens: int) -> TableChanges:
        """As `LowRankKernels.step`, with a table of this step's adapters."""
        slots = np.full(tokens, -1, np.int32)
        for slot, row in enumerate(rows):
            slots[row.first : row.first + row.tokens] = slot
        table = torch.stack([row.adapter.records for row in rows])
        listed, tiles = tile_tokens(slots)
        arrays = listed, tiles.reshape(-1), np.array([len(tiles)], np.int32)
        on_device = [torch.from_numpy(array).to(self._device) for array in arrays]
        return TableChanges(AdaptedTokens(on_device[0], on_device[1], on_device[2]), table)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """A context for copies to the device beside the steps, which are done at its end."""
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # Steps that were launched may still read what was in this memory.
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            try:
                yield
            finally:
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record(self._stream)
                done.synchronize()

    def _sizes(self, part: LinearPart, rank: int) -> tuple[int, int]:
        """Bytes of A and of B, aligned."""
        numbers = (_padded_rank(rank) * size for size in (part.inputs, part.outputs))
        a, b = (count * self._dtype.itemsize for count in numbers)
        return a + -a % _ALIGNMENT, b + -b % _ALIGNMENT

    def _padded(self, one: PartFactors) -> tuple[torch.Tensor, torch.Tensor]:
        """A [padded rank, inputs] and B [outputs, padded rank], on the host. Raises ModelError."""
        rank = len(one.a)
        padded = (
            torch.zeros(_padded_rank(rank), one.part.inputs, dtype=self._dtype),
            torch.zeros(one.part.outputs, _padded_rank(rank), dtype=self._dtype),
        )
        padded[0][:rank], padded[1][:, :rank] = one.a, one.b
        if not all(factor.isfinite().all() for factor in padded):
            where = f"{one.part.name} in layer {one.part.layer}"
            raise ModelError(f"{where} has values that are too large for {self._dtype}")
        return padded


def _padded_rank(rank: int) -> int:
    return rank + -rank % RANK_TILE


def _put(factor: torch.Tensor, place: torch.Tensor) -> int:
    """Copy a factor to the beginning of `place`, bytes; the address."""
    place[: factor.nbytes].view(factor.dtype).view(factor.shape).copy_(factor)
    return place.data_ptr()


class DeviceSlots(SlotAdapters):
    """`SlotAdapters` whose slots are rows of a table on the device, which captured steps read."""

    def __init__(self, spec: ModelSpec, kernels: LowRankKernels, shard: Shard, device: torch.device) -> None:
        super().__init__(spec, kernels, shard)
        self._records, self._device = spec.layers * len(PART_NAMES), device
        self.reserve(0)

    @property
    def count(self) -> int:
        """Number of slots."""
        return len(self.table)

    def reserve(self, count: int) -> None:
        """Have slots 0 to count - 1, all of them empty. Steps that were captured read the table before."""
        shape = count, self._records, RECORD_FIELDS
        self.table = torch.zeros(shape, dtype=torch.int64, device=self._device)

    def load(self, slot: int, packed: Any) -> None:
        """Write an adapter's addresses to the table, after all steps that were launched."""
        super().load(slot, packed)
        with torch.inference_mode():
            self.table[slot].copy_(packed.records)

    def unload(self, slot: int) -> None:
        """Forget what is in a slot, after all steps that were launched."""
        super().unload(slot)
        with torch.inference_mode():
            self.table[slot].zero_()

    def changes_of(self, rows: AdaptedTokens) -> TableChanges:
        """What adapters change in a step with these tokens, whatever is in their slots by then."""
        return TableChanges(rows, self.table)
