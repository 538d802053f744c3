"""`AdapterWeights`: what an adapter is made of, and `AdapterTarget`: what adapters of a model can change."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARENTS: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}
"""The linear layers that an adapter may change, and the part of a layer that each is in."""

LinearKey = tuple[int, str]
"""A linear layer: its transformer layer's number, and a key of PARENTS."""

Factor = NDArray[Any]
"""A factor as it is stored: float32, float16, or uint16 with the bits of bfloat16."""

_FORMAT = b"paceline/adapter/1"


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """The linear layers of a model that an adapter may change.

    `linears` maps (layer, name) to (inputs, outputs); None: the model has no weights, and any will do.
    `held` of (rank, what is changed, bytes of the factors as stored) is the memory in bytes that the backend
    holds an adapter in; None: as much as is stored.
    """

    linears: Mapping[LinearKey, tuple[int, int]] | None = None
    held: Callable[[int, Iterable[LinearKey], int], int] | None = None

    def held_bytes(self, rank: int, changed: Iterable[LinearKey], stored: int) -> int:
        """Bytes of memory of a loaded adapter."""
        return stored if self.held is None else self.held(rank, changed, stored)


@dataclass(frozen=True, slots=True, eq=False)
class LowRankChange:
    """The change of one linear layer: its weight [outputs, inputs] becomes W + scale * b @ a."""

    layer: int
    module: str  # a key of PARENTS
    a: Factor  # [rank, inputs]
    b: Factor  # [outputs, rank]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """One adapter, in host memory. Read-only: threads share it."""

    fingerprint: bytes
    rank: int
    scale: float
    changes: tuple[LowRankChange, ...]  # by layer, then by name

    @property
    def keys(self) -> list[LinearKey]:
        """The linear layers that it changes."""
        return [(change.layer, change.module) for change in self.changes]

    @property
    def bytes(self) -> int:
        """Bytes of the factors as they are stored."""
        return sum(change.a.nbytes + change.b.nbytes for change in self.changes)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the linear layers that it changes, in any layer."""
        present = {change.module for change in self.changes}
        return tuple(name for name in PARENTS if name in present)


def as_float32(factor: Factor) -> NDArray[np.float32]:
    """A factor's values."""
    if factor.dtype == np.uint16:
        return (factor.astype(np.uint32) << 16).view(np.float32)
    return factor.astype(np.float32)


def scaled(factor: Factor, by: float) -> Factor:
    """A factor multiplied by a number, in float32, where it may overflow to infinity; unchanged by 1."""
    with np.errstate(over="ignore"):
        return factor if by == 1 else as_float32(factor) * np.float32(by)


def padded(factor: Factor, rank: int, axis: int) -> Factor:
    """A factor of this rank along an axis: with zeros at the end, which change nothing."""
    missing = rank - factor.shape[axis]
    widths = [(0, missing if each == axis else 0) for each in range(2)]
    return np.pad(factor, widths) if missing else factor


def make_weights(
    rank: int, scale: float, changes: Iterable[LowRankChange], model_fingerprint: bytes
) -> AdapterWeights:
    """The adapter and its fingerprint: equal where rank, scale, factors and the model are equal."""
    ordered = tuple(sorted(changes, key=lambda change: (change.layer, change.module)))
    digest = hashlib.sha256(_FORMAT + struct.pack("<Id", rank, scale) + _framed(model_fingerprint))
    for change in ordered:
        for name, factor in (("a", change.a), ("b", change.b)):
            what = [change.layer, change.module, name, factor.dtype.str, list(factor.shape)]
            digest.update(_framed(json.dumps(what).encode()))
            digest.update(np.ascontiguousarray(factor).data)
    return AdapterWeights(digest.digest(), rank, scale, ordered)


def _framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text
