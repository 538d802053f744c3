"""`StepBuffer`: everything that the device has to know of a step, in one int32 array, copied at once.

The host derives what follows from lengths, such as the work of attention, as if all drafts of the step before
were accepted. What it does not know, `resolve` finds on the device.

Steps of one shape have their parts at the same offsets, padded, so that a CUDA graph captured with one of
them can be replayed with another. `HostStep` writes the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, lru_cache
from operator import ge
from typing import NamedTuple

import torch

from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import TILE_FIELDS, AdaptedTokens
from executor_service.backends.torch_backend.cuda.layout.resolve import HostRows, Resolved
from executor_service.backends.torch_backend.cuda.layout.rows import (
    ITEM_FIELDS,
    Tiling,
    attention_rows,
    names_of,
)

_ALIGNMENT = 4  # int32s: Triton compiles anew for a pointer that is not a multiple of 16 bytes
DRAWING_PARTS = ("seed_lows", "seed_highs", "temperatures", "top_ks", "top_ps", "min_ps")
"""The int32s of a `DRAWING`."""
RULES = DRAWING_PARTS[2:]
"""All but the seed."""
FLOATS = frozenset(("temperatures", "top_ps", "min_ps"))
"""Those of them that are the bits of an fp32."""
_REMEMBERED_SHAPES = 1024  # more than are captured


class StepShape(NamedTuple):
    """The lengths of the parts of a step, or upper bounds of them."""

    tokens: int
    rows: int
    outputs: int
    short_items: int  # the work of attention, see `AttentionRows`; of windows, the most
    short_parts: int
    long_items: int
    long_parts: int
    pages: int  # in all block tables together
    adapted_tokens: int = 0  # that adapters change, see `AdaptedTokens`
    adapted_tiles: int = 0
    windows: tuple[int, ...] = (0,)  # of the model, see `Tiling`

    def holds(self, other: StepShape) -> bool:
        """Whether a step of the other shape can be padded to this one, without kernels that it does not need.

        Steps with adapters launch some that others do not.
        """
        alike = bool(self.adapted_tiles) == bool(other.adapted_tiles)
        return alike and all(map(ge, self[:-1], other[:-1]))


class Padding(Enum):
    """What follows the numbers of a smaller step in a part."""

    ZEROS = auto()
    LAST = auto()  # the last number again: parts of attention's work that the step does not have are empty
    NONE = auto()  # nothing reads beyond what the step has


class PartGroup(NamedTuple):
    """Parts of one length in int32s, one after another: a field of `StepShape`, times `each`, and `more`."""

    parts: tuple[str, ...]
    field: str
    each: int = 1
    more: int = 0
    padding: Padding = Padding.ZEROS

    def length(self, shape: StepShape) -> int:
        """Of each part."""
        count: int = getattr(shape, self.field)
        return count * self.each + self.more


class PartPlace(NamedTuple):
    """Where the parts of a group are in the buffer: part i from begin + i * stride on."""

    group: PartGroup
    begin: int
    length: int
    stride: int

    def parts(self) -> Iterator[tuple[str, slice]]:
        """The name and the place of each part."""
        for index, name in enumerate(self.group.parts):
            begin = self.begin + index * self.stride
            yield name, slice(begin, begin + self.length)


@cache
def _groups_of(windows: tuple[int, ...]) -> tuple[PartGroup, ...]:
    """In the order of their offsets.

    Block tables come last: they are long, and what of them is unused need not be copied.
    """
    work = [(which, *names_of(which, window)) for window in windows for which in ("short", "long")]
    return (
        PartGroup(("tokens", "positions", "owners"), "tokens"),
        PartGroup(("follows", "starts", "table_starts", "first_outputs", "last_outputs"), "rows"),
        PartGroup(("outputs", *DRAWING_PARTS), "outputs"),
        *(PartGroup((bounds,), f"{which}_parts", 1, 1, Padding.LAST) for which, _, bounds in work),
        *(PartGroup((items,), f"{which}_items", ITEM_FIELDS, 0, Padding.NONE) for which, items, _ in work),
        PartGroup(("adapted_count",), "rows", each=0, more=1),
        PartGroup(("adapted_tiles",), "adapted_tiles", TILE_FIELDS, 0, Padding.NONE),
        PartGroup(("adapted_tokens",), "adapted_tokens", padding=Padding.NONE),
        PartGroup(("tables",), "pages", padding=Padding.NONE),
    )


@lru_cache(_REMEMBERED_SHAPES)
def places_of(shape: StepShape) -> tuple[PartPlace, ...]:
    """The places of all groups, in the order of their offsets."""
    places = []
    begin = 0
    for group in _groups_of(shape.windows):
        length = group.length(shape)
        stride = length + -length % _ALIGNMENT
        places.append(PartPlace(group, begin, length, stride))
        begin += len(group.parts) * stride
    return tuple(places)


def numbers_of(shape: StepShape) -> int:
    """The length in int32s of a buffer for steps of this shape."""
    last = places_of(shape)[-1]
    return last.begin + last.stride


@dataclass(frozen=True, slots=True)
class PickRows:
    """Sampling parameters of each row of logits: contiguous device tensors, [rows] each.

    A row of zeros is greedy. Padding may hold any bits: every pattern gives some token.
    """

    temperatures: torch.Tensor  # fp32; 0: greedy, the rest is not read; else at least MIN_TEMPERATURE
    key_lows: torch.Tensor  # int32, the low half of `noise.key`
    key_highs: torch.Tensor  # int32, the high half
    top_ks: torch.Tensor  # int32; 0 (or the vocabulary and above): off
    top_ps: torch.Tensor  # fp32; 1: off
    min_ps: torch.Tensor  # fp32; 0: off


class StepBuffer:
    """A step on the device: a view of each part of a buffer that holds a step of `shape`."""

    def __init__(self, buffer: torch.Tensor, shape: StepShape, tiling: Tiling, processors: int = 0) -> None:
        """`processors`: see `AttentionRows` and `AdaptedTokens`."""
        part = {name: buffer[where] for place in places_of(shape) for name, where in place.parts()}
        self.outputs = part["outputs"]
        self.first_outputs, self.last_outputs = part["first_outputs"], part["last_outputs"]
        self.rows = HostRows(*(part[name] for name in HostRows.__slots__))
        self.attention = attention_rows(part["tables"], part, tiling, processors)
        listed, tiles = part["adapted_tokens"], part["adapted_tiles"]
        self.adapted = (
            AdaptedTokens(listed, tiles, part["adapted_count"], processors) if shape.adapted_tiles else None
        )
        self._rules = {
            name: part[name].view(torch.float32) if name in FLOATS else part[name] for name in RULES
        }

    def pick(self, part: slice, resolved: Resolved) -> PickRows:
        """The sampling parameters of some consecutive outputs of the step."""
        keys = {"key_lows": resolved.key_lows[part], "key_highs": resolved.key_highs[part]}
        return PickRows(**keys, **{name: tensor[part] for name, tensor in self._rules.items()})


@dataclass(frozen=True, slots=True)
class Picked:
    """The results of a step on the device."""

    resolved: Resolved
    outputs: torch.Tensor  # int32 [outputs]: indices of the step's tokens
    residual: torch.Tensor  # [tokens, hidden], before the final norm
    picks: torch.Tensor  # int32 [2, outputs]: the token of each output, and whether its logits were finite
