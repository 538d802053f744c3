"""Low-rank changes of products (LoRA, arXiv:2106.09685): out += scale * (x A^T) B^T for rows with adapters.

Rows of one adapter follow each other, as a *group*. `ShrinkRows` computes scale * x A^T, as narrow as the
rank, and the product adds the rest to its own tiles, while they are in the cache ("shrink" and "expand" are
the words of Punica, arXiv:2310.18547). Sums go along K and along the rank in one chain each, as those of all
tiles do: a row's result depends neither on the other rows nor on the ranks of their adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.gemm import tile_fp16, tile_fp32
from executor_service.backends.torch_backend.cpu.gemm.tile import RESULT_BYTES, Product
from executor_service.backends.torch_backend.cpu.primitives.kernel import Kernel
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, ints, longs
from executor_service.backends.torch_backend.cpu.primitives.records import (
    WORD_BYTES,
    Address,
    reader,
    size_of,
)
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, MAX_ROWS
from executor_service.backends.torch_backend.cpu.primitives.vector_math import FLAGS
from executor_service.contract.limits import MAX_ADAPTER_RANK

Array = NDArray[np.float32]

MAX_PARTS = 3
"""Parts of a linear layer that have factors of their own: queries, keys and values."""
_PART_BYTES = 4 * MAX_ADAPTER_RANK
SHRUNK_BYTES = MAX_PARTS * _PART_BYTES
"""From row to row of what `ShrinkRows` computes."""


class Groups(NamedTuple):
    """Which rows have adapters."""

    size: int
    adapters: Address  # int64 [size]: where the adapter's records begin, a `Change` for each linear layer
    firsts: Address  # int32 [size]: first row of each group, ascending
    counts: Address  # int32 [size]: rows, 1 to MAX_ROWS


class Change(NamedTuple):
    """What one adapter changes in the outputs of one linear layer, or of a part of one that is stacked."""

    rank: int  # 0: nothing
    a: Address  # A [rank, k], packed into panels
    b: Address  # B [n, rank], packed into panels of the outputs
    scale: float
    first_panel: int  # of the outputs
    panels: int


class LowRank(NamedTuple):
    """Where the changes of one product are."""

    entry: int  # bytes from where an adapter's records begin to the first part's
    parts: int  # 0: adapters change nothing
    shrunk: Address  # fp32 [rows, MAX_PARTS, MAX_ADAPTER_RANK]


class ShrinkRows(NamedTuple):
    """shrunk = scale * x A^T, for each part and the rows of each group."""

    x: Address  # fp32 [rows, k]
    k: int
    groups: Groups
    low_rank: LowRank


class ShrinkRowsFp32(ShrinkRows):
    """Of factors in fp32."""


class ShrinkRowsFp16(ShrinkRows):
    """Of factors in fp16."""


CHANGE_BYTES = WORD_BYTES * size_of(Change)

_read_shrink, _read_change = reader(ShrinkRows), reader(Change)

Expand = Callable[[Groups, LowRank, int, int, int, int], None]
"""expand(groups, low_rank, out, n, low, high): out [rows, n] += changes, in the panels low to high - 1."""

ExpandPairs = Callable[[Groups, LowRank, int, int, int, int, int, int], None]
"""expand_pairs(groups, low_rank, first, rows, pair, pairs, out, out_stride): out += changes of some rows.

In `out` 16 columns of the first part alternate with 16 of the second; `out_stride` is in bytes.
"""


@njit(nogil=True)
def _change_at(groups: Groups, low_rank: LowRank, group: int, part: int) -> Change:
    begin = longs(groups.adapters, groups.size)[group]
    return _read_change(begin + low_rank.entry + CHANGE_BYTES * part)


@njit(nogil=True)
def _shrunk_at(low_rank: LowRank, row: int, part: int) -> int:
    return low_rank.shrunk + SHRUNK_BYTES * row + _PART_BYTES * part


@njit(nogil=True)
def _count_chunks(record: int) -> int:
    call = _read_shrink(record)
    return call.groups.size * call.low_rank.parts


def _make_shrink(put_tile: Product, panel_row_bytes: int) -> Callable[[int, int], None]:
    """The kernel of a chunk of `ShrinkRows`: a part of a group."""

    @njit(nogil=True, fastmath=FLAGS)
    def shrink_chunk(record: int, chunk: int) -> None:
        call = _read_shrink(record)
        groups, low_rank, k = call.groups, call.low_rank, call.k
        group, part = chunk // low_rank.parts, chunk % low_rank.parts
        change = _change_at(groups, low_rank, group, part)
        if change.rank == 0:
            return
        first, count = ints(groups.firsts, groups.size)[group], ints(groups.counts, groups.size)[group]
        panels, stride = (change.rank + LANES - 1) // LANES, k * panel_row_bytes
        x, to = call.x + 4 * k * first, _shrunk_at(low_rank, first, part)
        put_tile(x, 4 * k, change.a, stride, panels, k, to, SHRUNK_BYTES, count)
        for r in range(count):
            shrunk = floats(to + SHRUNK_BYTES * r, change.rank)
            for i in range(change.rank):
                shrunk[i] = shrunk[i] * change.scale

    return cast(Callable[[int, int], None], shrink_chunk)


def _make_expand(put_tile: Product, add_tile: Product, panel_row_bytes: int) -> Expand:
    @njit(nogil=True, fastmath=FLAGS)
    def expand(groups: Groups, low_rank: LowRank, out: int, n: int, low: int, high: int) -> None:
        whole = min(high, n // LANES)
        for group in range(groups.size):
            first, count = ints(groups.firsts, groups.size)[group], ints(groups.counts, groups.size)[group]
            for part in range(low_rank.parts):
                change = _change_at(groups, low_rank, group, part)
                begin, end = max(low, change.first_panel), min(high, change.first_panel + change.panels)
                if change.rank == 0 or begin >= end:
                    continue
                x, stride = _shrunk_at(low_rank, first, part), change.rank * panel_row_bytes
                w, to = change.b + (begin - change.first_panel) * stride, out + 4 * n * first
                panels = min(end, whole) - begin
                if panels > 0:
                    at = to + begin * RESULT_BYTES
                    add_tile(x, SHRUNK_BYTES, w, stride, panels, change.rank, at, 4 * n, count)
                if end > whole:  # of the last panel n needs only some columns
                    buffer = np.empty((MAX_ROWS, LANES), np.float32)
                    last = change.b + (whole - change.first_panel) * stride
                    put_tile(
                        x, SHRUNK_BYTES, last, 0, 1, change.rank, buffer.ctypes.data, RESULT_BYTES, count
                    )
                    for r in range(count):
                        columns = floats(to + 4 * n * r + whole * RESULT_BYTES, n - whole * LANES)
                        for j in range(len(columns)):
                            columns[j] = columns[j] + buffer[r, j]

    return cast(Expand, expand)


def _make_expand_pairs(add_tile: Product, panel_row_bytes: int) -> ExpandPairs:
    @njit(nogil=True)
    def expand_pairs(
        groups: Groups,
        low_rank: LowRank,
        first: int,
        rows: int,
        pair: int,
        pairs: int,
        out: int,
        out_stride: int,
    ) -> None:
        for group in range(groups.size):
            group_first = ints(groups.firsts, groups.size)[group]
            begin = max(group_first, first)
            count = min(group_first + ints(groups.counts, groups.size)[group], first + rows) - begin
            if count <= 0:
                continue
            for part in range(2):
                change = _change_at(groups, low_rank, group, part)
                if change.rank == 0:
                    continue
                x, stride = _shrunk_at(low_rank, begin, part), change.rank * panel_row_bytes
                w, to = change.b + pair * stride, out + out_stride * (begin - first) + RESULT_BYTES * part
                for _ in range(pairs):
                    add_tile(x, SHRUNK_BYTES, w, 0, 1, change.rank, to, out_stride, count)
                    w, to = w + stride, to + 2 * RESULT_BYTES

    return cast(ExpandPairs, expand_pairs)


_FP32_ROW_BYTES, _FP16_ROW_BYTES = 4 * LANES, 2 * LANES

expand_fp32 = _make_expand(tile_fp32.put_tile, tile_fp32.add_tile, _FP32_ROW_BYTES)
expand_fp16 = _make_expand(tile_fp16.put_tile, tile_fp16.add_tile, _FP16_ROW_BYTES)
expand_pairs_fp32 = _make_expand_pairs(tile_fp32.add_tile, _FP32_ROW_BYTES)
expand_pairs_fp16 = _make_expand_pairs(tile_fp16.add_tile, _FP16_ROW_BYTES)

SHRINK_ROWS_FP32 = Kernel(ShrinkRowsFp32, _count_chunks, _make_shrink(tile_fp32.put_tile, _FP32_ROW_BYTES))
SHRINK_ROWS_FP16 = Kernel(ShrinkRowsFp16, _count_chunks, _make_shrink(tile_fp16.put_tile, _FP16_ROW_BYTES))
