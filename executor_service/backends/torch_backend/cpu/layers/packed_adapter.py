"""`PackedAdapter`: an adapter's factors, in panels as the weights of linear layers are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.gemm.low_rank import CHANGE_BYTES, Change
from executor_service.backends.torch_backend.cpu.layers.linear_fp32 import pack_panels
from executor_service.backends.torch_backend.cpu.primitives.records import WORD_BYTES, address_of, words_of
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES
from executor_service.backends.torch_backend.ops.low_rank import (
    PART_NAMES,
    STACKS,
    AdapterShape,
    LinearPart,
    PartFactors,
)

_EXPONENT = (
    15  # of the largest number of a factor in fp16, which keeps as many as possible from being denormal
)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """The factors, and records with their addresses."""

    panels: torch.Tensor  # bytes
    changes: NDArray[np.int64]  # [layers, PART_NAMES, words of a `Change`]

    @property
    def bytes(self) -> int:
        """Memory of both."""
        return self.panels.nbytes + self.changes.nbytes


def packed_bytes(shape: AdapterShape, dtype: torch.dtype) -> int:
    """Bytes of a `PackedAdapter`."""
    records = shape.layers * len(PART_NAMES) * CHANGE_BYTES
    return records + sum(sum(_sizes(part, shape.rank, dtype)) for part in shape.parts)


def pack_adapter(
    shape: AdapterShape, scale: float, factors: Iterable[PartFactors], dtype: torch.dtype
) -> PackedAdapter:
    """An adapter whose factors are stored in fp32 or, each scaled by a power of two, in fp16."""
    size = sum(sum(_sizes(part, shape.rank, dtype)) for part in shape.parts)
    panels = torch.empty(size, dtype=torch.uint8)
    changes = np.zeros((shape.layers, len(PART_NAMES), CHANGE_BYTES // WORD_BYTES), np.int64)
    end = 0
    for one in factors:
        part, exponents, addresses = one.part, 0, []
        pairs = zip((one.a, one.b), _sizes(part, shape.rank, dtype), (0, _lead(part)), strict=True)
        for factor, factor_size, before in pairs:
            stored, exponent = _narrowed(factor) if dtype == torch.float16 else (factor, 0)
            place = panels[end : end + factor_size]
            place.view(dtype).copy_(pack_panels(stored, before).flatten())
            addresses.append(address_of(place))
            end, exponents = end + factor_size, exponents + exponent
        changes[part.layer, PART_NAMES.index(part.name)] = words_of(
            Change(
                rank=shape.rank,
                a=addresses[0],
                b=addresses[1],
                scale=_fp32(scale * 2.0**-exponents),
                first_panel=_first(part) // LANES,
                panels=_panels(_lead(part) + part.outputs),
            )
        )
    return PackedAdapter(panels, changes)


def _sizes(part: LinearPart, rank: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the panels of A and of B."""
    a, b = _panels(rank) * part.inputs, _panels(_lead(part) + part.outputs) * rank
    return a * LANES * dtype.itemsize, b * LANES * dtype.itemsize


def _first(part: LinearPart) -> int:
    """Its first output; gates and ups have panels of their own."""
    return 0 if part.name in STACKS["gated"] else part.first


def _lead(part: LinearPart) -> int:
    """Columns of the part's first panel that belong to the part before."""
    return _first(part) % LANES


def _panels(columns: int) -> int:
    return -(-columns // LANES)


def _narrowed(factor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """factor * 2^exponent in fp16, with a largest magnitude of 2^14 to 2^15; and the exponent."""
    largest = float(factor.abs().max())
    exponent = _EXPONENT - int(np.frexp(largest)[1]) if largest else 0
    return (factor.double() * 2.0**exponent).half(), exponent


def _fp32(value: float) -> float:
    """Rounded to fp32, where it may become infinite."""
    return float(torch.tensor(value, dtype=torch.float64).float())
