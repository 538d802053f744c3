"""`AttentionRows`: the work of a step's attention, cut into items of bounded size.

A query block is a few consecutive tokens of one row. Its keys are in pieces, each a fixed number of them; a
piece that is before the window of all of the block's tokens is left out. An item is a query block with a run
of consecutive pieces: one where there are few rows, so that many programs share a row, and more where there
are many, since each item costs time of its own. How pieces are shared out changes no result. There are two
classes of rows, whose blocks and pieces differ in size: short ones (decodes and verifications), which are
bound by memory, and long ones (chunks and prompts), bound by arithmetic.

The host cuts, since it knows every length. The device derives nothing and reads nothing back, so a CUDA graph
captured with the work of one step can be replayed with that of another: `RowWork.bounds` says how
much there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cuda.launch.launch import power_of_two

Ints = NDArray[np.int32]

SHORT_TOKENS = 16
"""A short row feeds at most this many tokens: a decode, or a verification of up to 15 drafts."""
MAX_CONTEXT = 1 << 20
"""Tokens of the longest row: with the sizes below, all pieces of its keys fit into one part."""
ITEM_FIELDS = 7
"""int32s of an item: the flat index of its block's first token among the step's tokens, the block's number of
tokens, the first one's position in its sequence, where the row's block table starts, the number of the run's
first piece, the run's pieces, and the first one's place among the partial results of its launch.
"""
# Lines of a query block's matrix: its tokens times the query heads that share a KV head. The fewest that a
# matrix instruction has leave registers and shared memory for more keys on their way. In fp32, for which
# there are no full matrix instructions, 128 would not fit into the registers, nor would they with heads of
# more than 128 dimensions.
_SHORT_LINES, _LONG_LINES, _LONG_LINES_FP32 = 16, 128, 32
_LONG_ELEMENTS = 128 * 128  # of a long block's result, at most
_SHORT_SPLIT, _LONG_SPLIT = 256, 2048
_SHORT_PART, _LONG_PART = 4096, 512
MAX_PART = max(_SHORT_PART, _LONG_PART)
"""Pieces of a launch, at most: their partial results are in memory together."""
# Programs of short rows that keep a device's memory busy: two for each multiprocessor of a large one. Where
# there are more pieces, items are runs of them. Long rows are bound by arithmetic: each piece is an item.
_BUSY = 256


class RowCut(NamedTuple):
    """How the rows of one class are cut."""

    block: int  # tokens of a query block
    split: int  # keys of an item
    part: int  # maximum pieces of one launch; up to MAX_PART
    busy: int = 0  # items of a step that keep the device busy; 0: each piece is an item

    @property
    def in_runs(self) -> bool:
        """Whether items may have several pieces."""
        return self.busy > 0


class Tiling(NamedTuple):
    """The cuts of both classes, and the windows of the layers; they follow from the model alone."""

    short: RowCut
    long: RowCut
    windows: tuple[int, ...] = (0,)  # tokens that a token sees, up to itself; 0: all

    @classmethod
    def of(
        cls,
        group: int,
        dtype: torch.dtype,
        head_dim: int = 128,
        windows: tuple[int, ...] = (0,),
        kv_heads: int = 1,
    ) -> Tiling:
        """For `group` query heads that share each of `kv_heads`, and q of this dtype."""
        long = _LONG_LINES_FP32 if dtype == torch.float32 else _LONG_LINES
        long = min(long, _LONG_ELEMENTS // power_of_two(head_dim))
        # In other kernels the loop over a run's pieces takes registers that are not there.
        in_runs = power_of_two(head_dim) == 128 and not any(windows) and dtype != torch.float32
        busy = max(_BUSY // kv_heads, 1) if in_runs else 0
        return cls(
            RowCut(max(_SHORT_LINES // group, 1), _SHORT_SPLIT, _SHORT_PART, busy),
            RowCut(max(long // group, 1), _LONG_SPLIT, _LONG_PART),
            windows,
        )

    @property
    def classes(self) -> tuple[tuple[str, RowCut], ...]:
        """The names of both classes, and their cuts."""
        return ("short", self.short), ("long", self.long)


@dataclass(frozen=True, slots=True)
class RowWork:
    """The items of one class of rows, int32 on the device of q, in parts that are launched one by one.

    The items of a block are consecutive, in the order of their pieces, and in one part. Raises ValueError for
    a tensor that is not int32 or not contiguous.
    """

    items: torch.Tensor  # [at least the number of pieces, ITEM_FIELDS]
    bounds: torch.Tensor  # [parts + 1]: the items of part i are bounds[i] .. bounds[i + 1] - 1
    cut: RowCut

    def __post_init__(self) -> None:
        for name in ("items", "bounds"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"{name} has to be int32 and contiguous")

    @property
    def slots(self) -> int:
        """Upper bound of the pieces of a part, and of its items."""
        return min(len(self.items), self.cut.part)


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """What attention has to know of a step's rows, in the layers with one window."""

    window: int  # see `Tiling.windows`
    tables: torch.Tensor  # int32: the block tables of all rows, concatenated
    short: RowWork
    long: RowWork
    # Multiprocessors of the device, where launches have only the programs that it runs at once, whatever the
    # length of `items`; 0: a program for each item and KV head.
    processors: int = 0


def attention_rows(
    tables: torch.Tensor, parts: Mapping[str, torch.Tensor], tiling: Tiling, processors: int = 0
) -> dict[int, AttentionRows]:
    """The rows for each window, from what `cut` returns, on the device; items may be flat."""
    every = {}
    for window in tiling.windows:
        short, long = (
            RowWork(parts[items].view(-1, ITEM_FIELDS), parts[bounds], how)
            for (items, bounds), how in ((names_of(name, window), how) for name, how in tiling.classes)
        )
        every[window] = AttentionRows(window, tables, short, long, processors)
    return every


@cache
def names_of(which: str, window: int) -> tuple[str, str]:
    """What `cut` calls the items and the bounds of one class of rows in the layers with one window."""
    suffix = f"_{window}" if window else ""
    return f"{which}_items{suffix}", f"{which}_bounds{suffix}"


def most_work(arrays: Mapping[str, NDArray[Any]], tiling: Tiling) -> dict[str, int]:
    """How many items and parts of each class `cut` has room for, at most for one window."""
    most = {}
    for which, _ in tiling.classes:
        names = [names_of(which, window) for window in tiling.windows]
        most[f"{which}_items"] = max(len(arrays[items]) for items, _ in names)
        most[f"{which}_parts"] = max(len(arrays[bounds]) - 1 for _, bounds in names)
    return most


def cut(
    starts: Ints, counts: Ints, table_starts: Ints, tiling: Tiling, slacks: Ints | None = None
) -> dict[str, Ints]:
    """The items and bounds of both classes and all windows, by `names_of`; items have room for all pieces.

    The rows have `starts` cached and `counts` new tokens, at least one; they may have up to `slacks` fewer
    cached ones, and get the items for what they see then, too.
    starts, counts, table_starts, slacks: [rows]; None: no slacks. A row's pieces depend on the row alone,
    hence also its sums and their order; how many of them an item has depends on all rows. Raises ValueError
    for a row with more pieces of keys than a part has.
    """
    firsts = np.add.accumulate(counts, dtype=np.int32) - counts
    rows = np.array(
        (firsts, counts, starts, table_starts, np.zeros_like(starts) if slacks is None else slacks)
    )
    of_class = {"short": rows, "long": rows[:, :0]}
    longest = counts.max()
    if longest > SHORT_TOKENS:  # in most steps none is
        short = counts <= SHORT_TOKENS
        of_class = {"short": rows[:, short], "long": rows[:, ~short]}
    arrays: dict[str, Ints] = {}
    for window in tiling.windows:
        for name, how in tiling.classes:
            items, bounds = names_of(name, window)
            # Blocks of long rows that see more keys take longer, and start first.
            arrays[items], arrays[bounds] = _cut_class(
                of_class[name], longest, how, window, last_first=name == "long"
            )
    return arrays


def _cut_class(rows: Ints, longest: int, how: RowCut, window: int, *, last_first: bool) -> tuple[Ints, Ints]:
    """The items and bounds of one class, in the layers with one window.

    rows [5, rows]: the first four fields of a block of all of the row's tokens, and its slack;
    longest: tokens of none is above it.
    """
    if not rows.shape[1]:
        return np.empty((0, ITEM_FIELDS), np.int32), np.zeros(1, np.int32)
    blocks = rows if longest <= how.block else _blocks(rows, how.block)
    if last_first:
        blocks = blocks[:, ::-1]
    _, tokens, positions, _, slacks = blocks
    # From the first key that the block's first token sees to the last one that its last token sees.
    ends = pieces = (positions + tokens + (how.split - 1)) // how.split
    if window:
        pieces = ends - np.maximum(positions - slacks - (window - 1), 0) // how.split
    piece_ends = np.add.accumulate(pieces, dtype=np.int32)
    run = max(int(piece_ends[-1]) // how.busy, 1) if how.in_runs else 1
    runs = pieces if run == 1 else -(-pieces // run)
    run_ends = piece_ends if run == 1 else np.add.accumulate(runs, dtype=np.int32)
    bounds = _bounds(piece_ends, how.part)
    room = np.zeros((piece_ends[-1], ITEM_FIELDS), np.int32)
    items = room[: run_ends[-1]]
    items[:, :4] = blocks[:4].T.repeat(runs, axis=0)
    of_block = np.arange(len(items), dtype=np.int32) - (run_ends - runs).repeat(runs)  # number of the run
    before = of_block * run  # pieces of the block
    items[:, 4] = before + (ends - pieces).repeat(runs)
    items[:, 5] = 1 if run == 1 else np.minimum(pieces.repeat(runs) - before, run)
    slots = before + (piece_ends - pieces).repeat(runs)
    if len(bounds) > 2:  # in most steps there is one part
        slots -= bounds[bounds.searchsorted(slots, "right") - 1]
    items[:, 6] = slots
    if run > 1:
        bounds = np.append(np.int32(0), run_ends)[np.append(np.int32(0), piece_ends).searchsorted(bounds)]
    return room, bounds


def _blocks(rows: Ints, block: int) -> Ints:
    """The query blocks of some rows, like these."""
    counts = -(-rows[1] // block)
    blocks = rows.repeat(counts, axis=1)
    ends = np.add.accumulate(counts, dtype=np.int32)
    firsts = (np.arange(ends[-1], dtype=np.int32) - (ends - counts).repeat(counts)) * block
    blocks[0] += firsts
    blocks[1] = np.minimum(blocks[1] - firsts, block)
    blocks[2] += firsts
    return blocks


def _bounds(ends: Ints, part: int) -> Ints:
    """Where parts of at most `part` pieces begin and end, none of them within a block; these have `ends`."""
    total = int(ends[-1])
    if total > part and (most := int(np.diff(ends, prepend=0).max())) > part:
        raise ValueError(f"{most} pieces of a row's keys are above the {part} of a launch")
    bounds = [0]
    while total - bounds[-1] > part:
        bounds.append(int(ends[ends.searchsorted(bounds[-1] + part, "right") - 1]))
    return np.array([*bounds, total], np.int32)
