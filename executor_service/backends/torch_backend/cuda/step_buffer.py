"""`StepBuffer`: everything that the device has to know of a step, in one int32 array, copied at once.

The host derives what follows from lengths, such as the work of attention, as if all drafts of the step before
were accepted. What it does not know, `resolve` finds on the device.

Steps of one shape have their parts at the same offsets, padded, so that a CUDA graph captured with one of
them can be replayed with another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import cache, lru_cache
from operator import ge
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import columns_of, others_of
from executor_service.backends.torch_backend.batch import Layout, lay_out
from executor_service.backends.torch_backend.cuda.adapted_tokens import (
    TILE_FIELDS,
    AdaptedTokens,
    tile_tokens,
)
from executor_service.backends.torch_backend.cuda.pick import PickRows
from executor_service.backends.torch_backend.cuda.resolve import HostRows, Resolved
from executor_service.backends.torch_backend.cuda.rows import (
    ITEM_FIELDS,
    Ints,
    Tiling,
    attention_rows,
    cut,
    most_work,
    names_of,
)
from executor_service.backends.torch_backend.sampler import MIN_TEMPERATURE
from executor_service.contract.plan import DRAWING, Sampling

_NOTHING_ADAPTED = np.empty(0, np.int32), np.empty((0, TILE_FIELDS), np.int32)
_ALIGNMENT = 4  # int32s: Triton compiles anew for a pointer that is not a multiple of 16 bytes
_RULES = ("temperatures", "top_ks", "top_ps", "min_ps")
_FLOATS = ("temperatures", "top_ps", "min_ps")
_MIN_TEMPERATURE, _ONE = np.float32(MIN_TEMPERATURE), np.float32(1)
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


class _Padding(Enum):
    """What follows the numbers of a smaller step in a part."""

    ZEROS = auto()
    LAST = auto()  # the last number again: parts of attention's work that the step does not have are empty
    NONE = auto()  # nothing reads beyond what the step has


class _Part(NamedTuple):
    """A part's length in int32s is a field of `StepShape`, times `each`, and `more`."""

    field: str
    each: int = 1
    more: int = 0
    padding: _Padding = _Padding.ZEROS

    def length(self, shape: StepShape) -> int:
        count: int = getattr(shape, self.field)
        return count * self.each + self.more


@cache
def _parts_of(windows: tuple[int, ...]) -> Mapping[str, _Part]:
    """The parts in the order of their offsets.

    Block tables come last: they are long, and what of them is unused need not be copied.
    """
    work = [(which, *names_of(which, window)) for window in windows for which in ("short", "long")]
    return {
        **dict.fromkeys(("tokens", "positions", "owners"), _Part("tokens")),
        **dict.fromkeys(
            ("follows", "starts", "table_starts", "first_outputs", "last_outputs"), _Part("rows")
        ),
        **dict.fromkeys(
            ("outputs", "seed_lows", "seed_highs", "temperatures", "top_ks", "top_ps", "min_ps"),
            _Part("outputs"),
        ),
        **{bounds: _Part(f"{which}_parts", 1, 1, _Padding.LAST) for which, _, bounds in work},
        **{items: _Part(f"{which}_items", ITEM_FIELDS, 0, _Padding.NONE) for which, items, _ in work},
        "adapted_count": _Part("rows", each=0, more=1),
        "adapted_tiles": _Part("adapted_tiles", TILE_FIELDS, 0, _Padding.NONE),
        "adapted_tokens": _Part("adapted_tokens", padding=_Padding.NONE),
        "tables": _Part("pages", padding=_Padding.NONE),
    }


def numbers_of(shape: StepShape) -> int:
    """The length in int32s of a buffer for steps of this shape."""
    _, last = _places(shape)[-1]
    end: int = last.stop
    return end


@lru_cache(_REMEMBERED_SHAPES)
def _places(shape: StepShape) -> tuple[tuple[str, slice], ...]:
    """Each part's name and its place in the buffer."""
    places = []
    begin = 0
    for name, part in _parts_of(shape.windows).items():
        end = begin + part.length(shape)
        places.append((name, slice(begin, end)))
        begin = end + -end % _ALIGNMENT
    return tuple(places)


class HostStep:
    """The contents of a step's buffer, on the host."""

    def __init__(self, rows: Sequence[ForwardRow], page_size: int, tiling: Tiling) -> None:
        columns = columns_of(rows, page_size)
        layout = lay_out(columns, page_size)
        counts = layout.output_counts
        ends = counts.cumsum(dtype=np.int32)
        adapted, tiles = _adapted(others_of(rows), layout)
        arrays: dict[str, Ints] = {
            **cut(layout.starts, layout.counts, layout.table_starts, tiling, columns.slacks),
            **_pick_parts(columns.samplings, layout),
            "tokens": layout.tokens,
            "positions": layout.positions,
            "owners": np.arange(1, len(counts) + 1, dtype=np.int32).repeat(layout.counts),
            "follows": columns.follows + 1,
            "starts": layout.starts,
            "table_starts": layout.table_starts,
            "tables": layout.tables,
            "outputs": layout.outputs,
            "first_outputs": ends - counts,
            "last_outputs": np.maximum(ends - 1, 0),
            "adapted_count": np.array([len(tiles)], np.int32),
            "adapted_tiles": tiles,
            "adapted_tokens": adapted,
        }
        self._arrays = arrays
        self.shape = StepShape(
            tokens=len(layout.tokens),
            rows=len(counts),
            outputs=len(layout.outputs),
            **most_work(arrays, tiling),
            pages=len(layout.tables),
            adapted_tokens=len(adapted),
            adapted_tiles=len(tiles),
            windows=tiling.windows,
        )

    def write(self, shape: StepShape, buffer: Ints) -> int:
        """Write the step into `buffer`, padded to `shape`; returns the number of int32s to copy."""
        end, parts = 0, _parts_of(shape.windows)
        for name, place in _places(shape):
            array = self._arrays[name]
            end = place.start + array.size
            buffer[place.start : end] = array if array.ndim == 1 else array.reshape(-1)
            padding = parts[name].padding
            if end < place.stop and padding is not _Padding.NONE:
                buffer[end : place.stop] = array[-1] if padding is _Padding.LAST else 0
        return end

    def pick_parts(self, outputs: Ints) -> dict[str, NDArray[np.generic]]:
        """The fields of `PickRows` for some of the outputs, without the keys, which the device has."""
        parts: dict[str, NDArray[np.generic]] = {name: self._arrays[name][outputs] for name in _RULES}
        return parts | {name: parts[name].view(np.float32) for name in _FLOATS}


def _adapted(last_rows: Sequence[ForwardRow], layout: Layout) -> tuple[Ints, Ints]:
    """The tokens that adapters change, and their tiles. Rows before the last ones have no adapter."""
    slots = np.array([row.slot for row in last_rows], np.int32)
    if not (slots >= 0).any():
        return _NOTHING_ADAPTED
    before = np.full(len(layout.counts) - len(slots), -1, np.int32)
    return tile_tokens(np.concatenate([before, slots]).repeat(layout.counts))


def _pick_parts(samplings: Sequence[Sampling], layout: Layout) -> dict[str, Ints]:
    """The parts of `PickRows`, for each output, and the seeds of its key, as int32s; samplings [rows]."""
    drawings = np.frombuffer(b"".join([s.drawing for s in samplings]), DRAWING).repeat(layout.output_counts)
    temperatures = drawings["temperature"]
    halves = np.ascontiguousarray(drawings["seed"]).view(np.int32).reshape(-1, 2)
    return {
        "temperatures": np.maximum(temperatures, _MIN_TEMPERATURE * (temperatures > 0)).view(np.int32),
        "seed_lows": halves[:, 0],
        "seed_highs": halves[:, 1],
        "top_ks": drawings["top_k"],
        "top_ps": drawings["top_p"].view(np.int32),
        "min_ps": np.minimum(drawings["min_p"], _ONE).view(np.int32),
    }


class StepBuffer:
    """A step on the device: a view of each part of a buffer that holds a step of `shape`."""

    def __init__(self, buffer: torch.Tensor, shape: StepShape, tiling: Tiling, processors: int = 0) -> None:
        """`processors`: see `AttentionRows` and `AdaptedTokens`."""
        part = {name: buffer[place] for name, place in _places(shape)}
        self.outputs = part["outputs"]
        self.first_outputs, self.last_outputs = part["first_outputs"], part["last_outputs"]
        self.rows = HostRows(*(part[name] for name in HostRows.__slots__))
        self.attention = attention_rows(part["tables"], part, tiling, processors)
        listed, tiles = part["adapted_tokens"], part["adapted_tiles"]
        self.adapted = (
            AdaptedTokens(listed, tiles, part["adapted_count"], processors) if shape.adapted_tiles else None
        )
        self._rules = {
            name: part[name].view(torch.float32) if name in _FLOATS else part[name] for name in _RULES
        }

    def pick(self, part: slice, resolved: Resolved) -> PickRows:
        """The sampling parameters of some consecutive outputs of the step."""
        keys = {"key_lows": resolved.key_lows[part], "key_highs": resolved.key_highs[part]}
        return PickRows(**keys, **{name: tensor[part] for name, tensor in self._rules.items()})
