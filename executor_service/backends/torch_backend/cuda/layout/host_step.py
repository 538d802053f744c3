"""`HostStep`: the contents of a step's buffer, computed on the host.

All is computed by column, and written by groups of columns. The rows that only decode come first: as each of
them has one token and one output, a row, its token and its output have the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows, RowColumns
from executor_service.backends.torch_backend.cuda.layout.adapted_tokens import TILE_FIELDS, tile_tokens
from executor_service.backends.torch_backend.cuda.layout.rows import Ints, Tiling, cut, most_work
from executor_service.backends.torch_backend.cuda.layout.step_buffer import (
    DRAWING_PARTS,
    FLOATS,
    RULES,
    Padding,
    StepShape,
    numbers_of,
    places_of,
)

_NOTHING_ADAPTED = np.empty(0, np.int32), np.empty((0, TILE_FIELDS), np.int32)


class StepNumbers:
    """A step's shape and the numbers of its parts."""

    def __init__(self, shape: StepShape, numbers: Mapping[str, Ints]) -> None:
        """`numbers`: by the first part of each group, at most as many as `shape` says."""
        self.shape, self._numbers = shape, numbers

    @classmethod
    def unpack(cls, packed: Ints, windows: tuple[int, ...]) -> StepNumbers:
        """What `pack` made of a step of a model with these windows."""
        lengths = len(StepShape._fields) - 1
        shape = StepShape(*packed[:lengths].tolist())._replace(windows=windows)
        buffer, numbers = packed[lengths:], {}
        for group, begin, length, stride in places_of(shape):
            parts = len(group.parts)
            there = buffer[begin : begin + parts * stride].reshape(parts, stride)
            numbers[group.parts[0]] = there[:, :length]
        return cls(shape, numbers)

    def pack(self) -> Ints:
        """The lengths of the shape, and a buffer without padding."""
        lengths = self.shape[:-1]
        packed = np.empty(len(lengths) + numbers_of(self.shape), np.int32)
        packed[: len(lengths)] = lengths
        self.write(self.shape, packed[len(lengths) :])
        return packed

    def write(self, shape: StepShape, buffer: Ints) -> int:
        """Write the step into `buffer`, padded to `shape`; returns the number of int32s to copy."""
        end = 0
        for group, begin, length, stride in places_of(shape):
            if not length:
                continue
            parts = len(group.parts)
            numbers = self._numbers[group.parts[0]].reshape(parts, -1)
            have = numbers.shape[1]
            there = buffer[begin : begin + parts * stride].reshape(parts, stride)
            there[:, :have] = numbers
            if have < length and group.padding is not Padding.NONE:
                there[:, have:length] = numbers[:, -1:] if group.padding is Padding.LAST else 0
            end = begin + have
        return end


class HostStep(StepNumbers):
    """Those of some rows."""

    def __init__(self, rows: ForwardRows, page_size: int, tiling: Tiling) -> None:
        columns, others = rows.columns(page_size), list(rows.others.values())
        at = _numbering(columns) if others else _numbering_of_decodes(columns)
        table_ends = np.array([0, *accumulate(map(len, columns.tables))], np.int32)
        table_starts = table_ends[:-1]
        work = cut(columns.starts, columns.counts, table_starts, tiling, columns.slacks)
        adapted, tiles = _adapted(others, columns.counts) if others else _NOTHING_ADAPTED
        self._outputs = np.empty((1 + len(DRAWING_PARTS), len(at.outputs)), np.int32)
        self._outputs[0] = at.outputs
        self._outputs[1:] = _drawings(columns).T
        # By the first part of each group.
        numbers: dict[str, Ints] = {
            **work,
            "tokens": np.array((columns.tokens, at.positions, at.owners)),
            "follows": np.array(
                (columns.follows + 1, columns.starts, table_starts, at.first_outputs, at.last_outputs)
            ),
            "outputs": self._outputs,
            "tables": np.concatenate(columns.tables),
            "adapted_count": np.array([len(tiles)], np.int32),
            "adapted_tiles": tiles,
            "adapted_tokens": adapted,
        }
        shape = StepShape(
            tokens=len(at.positions),
            rows=len(columns.counts),
            outputs=len(at.outputs),
            **most_work(work, tiling),
            pages=len(numbers["tables"]),
            adapted_tokens=len(adapted),
            adapted_tiles=len(tiles),
            windows=tiling.windows,
        )
        super().__init__(shape, numbers)

    def pick_parts(self, outputs: Ints) -> dict[str, NDArray[np.generic]]:
        """The fields of `PickRows` for some of the outputs, without the keys, which the device has."""
        rules = zip(RULES, self._outputs[-len(RULES) :, outputs], strict=True)
        return {name: numbers.view(np.float32) if name in FLOATS else numbers for name, numbers in rules}


class _Numbering(NamedTuple):
    """Where the rows' tokens and outputs are among all of the step."""

    owners: Ints  # [tokens]: the token's row, plus 1
    positions: Ints  # [tokens]: in the row's sequence
    outputs: Ints  # [outputs]: indices of the tokens at output positions
    first_outputs: Ints  # [rows]
    last_outputs: Ints  # [rows]; one before the first where a row has none, but at least 0


def _numbering_of_decodes(columns: RowColumns) -> _Numbering:
    """What `_numbering` returns where all rows have one token and one output."""
    numbers = np.arange(1 + len(columns.starts), dtype=np.int32)
    same = numbers[:-1]
    return _Numbering(numbers[1:], columns.starts, same, same, same)


def _numbering(columns: RowColumns) -> _Numbering:
    starts, counts, drawn = columns.starts, columns.counts, columns.outputs
    ends, output_ends = np.add.accumulate(counts, dtype=np.int32), np.add.accumulate(drawn, dtype=np.int32)
    numbers = np.arange(max(ends[-1], len(counts) + 1), dtype=np.int32)
    return _Numbering(
        owners=numbers[1 : len(counts) + 1].repeat(counts),
        positions=numbers[: ends[-1]] + (starts - ends + counts).repeat(counts),
        outputs=numbers[: output_ends[-1]] + (ends - output_ends).repeat(drawn),
        first_outputs=output_ends - drawn,
        last_outputs=np.maximum(output_ends - 1, 0),
    )


def _drawings(columns: RowColumns) -> Ints:
    """The `DRAWING` of each output, as int32s: [outputs, those of `DRAWING_PARTS`]."""
    drawings = np.frombuffer(b"".join([s.drawing for s in columns.samplings]), np.int32)
    of_outputs: Ints = drawings.reshape(-1, len(DRAWING_PARTS)).repeat(columns.outputs, axis=0)
    return of_outputs


def _adapted(last_rows: Sequence[ForwardRow], counts: Ints) -> tuple[Ints, Ints]:
    """The tokens that adapters change, and their tiles. Rows before the last ones have no adapter."""
    if not any(row.slot >= 0 for row in last_rows):
        return _NOTHING_ADAPTED
    slots = np.array([row.slot for row in last_rows], np.int32)
    before = np.full(len(counts) - len(slots), -1, np.int32)
    return tile_tokens(np.concatenate([before, slots]).repeat(counts))


class RankMessage(IntEnum):
    """What to repeat."""

    STEP = 0  # of `StepNumbers.pack`
    LATE = 1  # logits of the last step's tokens, see `LatePicks.repeat`
    CAPTURE = 2  # rows and tokens, see `DeviceRunner.capture`
