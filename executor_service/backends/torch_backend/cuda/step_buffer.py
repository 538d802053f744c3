"""`StepBuffer`: everything that the device has to know of a step, in one int32 array, copied at once.

The host derives all of it, since it knows every length: page and slot of each token, the work of attention,
the noise keys. A token that the step before this one samples may not be known yet. It is written as `-1 - r`,
r being the index of the row that samples it, and the device looks it up.

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
from executor_service.backends.torch_backend.cuda.kernels import CudaStep
from executor_service.backends.torch_backend.cuda.pick import PickRows
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
from executor_service.contract import noise
from executor_service.contract.plan import DRAWING, Sampling

_NOTHING_ADAPTED = np.empty(0, np.int32), np.empty((0, TILE_FIELDS), np.int32)
_ALIGNMENT = 4  # int32s: Triton compiles anew for a pointer that is not a multiple of 16 bytes
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
        **dict.fromkeys(("tokens", "positions", "page_of_token", "slots"), _Part("tokens")),
        "last_outputs": _Part("rows"),
        **dict.fromkeys(
            ("outputs", "temperatures", "key_lows", "key_highs", "top_ks", "top_ps", "min_ps"),
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
        tokens, counts, follows = layout.tokens, layout.output_counts, columns.follows
        if not (known := follows < 0).all():
            last = layout.counts.cumsum() - 1
            tokens[last] = np.where(known, tokens[last], -1 - follows)
        adapted, tiles = _adapted(others_of(rows), layout)
        arrays: dict[str, Ints] = {
            **cut(layout.starts, layout.counts, layout.table_starts, tiling),
            **_pick_parts(columns.samplings, layout),
            "tokens": tokens,
            "positions": layout.positions,
            "page_of_token": layout.pages,
            "slots": layout.slots,
            "tables": layout.tables,
            "outputs": layout.outputs,
            "last_outputs": np.maximum(counts.cumsum(dtype=np.int32) - 1, 0),
            "adapted_count": np.array([len(tiles)], np.int32),
            "adapted_tiles": tiles,
            "adapted_tokens": adapted,
        }
        self._arrays = arrays
        self.shape = StepShape(
            tokens=len(tokens),
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
        """The fields of `PickRows` for some of the outputs."""
        parts: dict[str, NDArray[np.generic]] = {
            name: self._arrays[name][outputs] for name in PickRows.__slots__
        }
        return parts | {name: parts[name].view(np.float32) for name in _FLOATS}


def _adapted(last_rows: Sequence[ForwardRow], layout: Layout) -> tuple[Ints, Ints]:
    """The tokens that adapters change, and their tiles. Rows before the last ones have no adapter."""
    slots = np.array([row.slot for row in last_rows], np.int32)
    if not (slots >= 0).any():
        return _NOTHING_ADAPTED
    before = np.full(len(layout.counts) - len(slots), -1, np.int32)
    return tile_tokens(np.concatenate([before, slots]).repeat(layout.counts))


def _pick_parts(samplings: Sequence[Sampling], layout: Layout) -> dict[str, Ints]:
    """The parts of `PickRows`, for each output, as int32s; samplings [rows]."""
    drawings = np.frombuffer(b"".join([s.drawing for s in samplings]), DRAWING).repeat(layout.output_counts)
    temperatures = drawings["temperature"]
    # The output of position p is the token at index p + 1.
    halves = noise.keys(drawings["seed"], layout.positions[layout.outputs] + 1).view(np.int32).reshape(-1, 2)
    return {
        "temperatures": np.maximum(temperatures, _MIN_TEMPERATURE * (temperatures > 0)).view(np.int32),
        "key_lows": halves[:, 0],
        "key_highs": halves[:, 1],
        "top_ks": drawings["top_k"],
        "top_ps": drawings["top_p"].view(np.int32),
        "min_ps": np.minimum(drawings["min_p"], _ONE).view(np.int32),
    }


class StepBuffer:
    """A step on the device: a view of each part of a buffer that holds a step of `shape`."""

    def __init__(self, buffer: torch.Tensor, shape: StepShape, tiling: Tiling, processors: int = 0) -> None:
        """`processors`: see `AttentionRows` and `AdaptedTokens`."""
        part = {name: buffer[place] for name, place in _places(shape)}
        self.tokens, self.outputs, self.last_outputs = part["tokens"], part["outputs"], part["last_outputs"]
        rows = attention_rows(part["tables"], part, tiling, processors)
        self.attention = CudaStep(part["positions"], part["page_of_token"], part["slots"], rows)
        listed, tiles = part["adapted_tokens"], part["adapted_tiles"]
        self.adapted = (
            AdaptedTokens(listed, tiles, part["adapted_count"], processors) if shape.adapted_tiles else None
        )
        self._pick = {
            name: part[name].view(torch.float32) if name in _FLOATS else part[name]
            for name in PickRows.__slots__
        }

    def pick(self, part: slice | torch.Tensor) -> PickRows:
        """The sampling parameters of some of the outputs: consecutive ones, or those with these numbers."""
        return PickRows(**{name: tensor[part] for name, tensor in self._pick.items()})
