"""Paged attention on CPU, in fp32, after `rotate` has written K and V into `pages`.

Work is cut into items: up to 24 query vectors of one sequence, which are some positions times the query heads
that share a KV head; one position, if more than 24 heads share one. An item goes over the keys in blocks of 8
tiles, from the first key that its first query sees, with an online softmax (Milakov, Gimelshein 2018). Block
borders depend on positions alone, and masked keys add exact zeros; what a block adds that is masked as a
whole is multiplied by 0 in the next one. So **a query's result depends neither on other queries nor on how
its sequence was cut into chunks**, as long as the keys and values that its item goes over are finite. A key
that is not finite makes the results of the queries that see it NaN. A value that is not makes them NaN or
infinite in its own dimension alone (in int8 pages NaN in all of them), and there also NaN in the item's
queries that do not see it, which multiply it by 0. Slots that were never written may hold NaN: their scores
are overwritten, and their values are not multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.attention.pages import (
    Pages,
    add_values,
    dim_panels,
    key_tile,
    page_tiles,
    prefetch_keys,
    prefetch_values,
    put_scores,
    tile_scales,
    value_panel,
)
from executor_service.backends.torch_backend.cpu.gemm.tile import RESULT_BYTES
from executor_service.backends.torch_backend.cpu.primitives.kernel import Kernel
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, ints, matrix
from executor_service.backends.torch_backend.cpu.primitives.records import Address, reader
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, tile_rows
from executor_service.backends.torch_backend.cpu.primitives.vector_math import (
    FLAGS,
    exp32,
    largest,
    tanh32,
)

Array = NDArray[np.float32]
Ints = NDArray[np.int32]

ITEM_ROWS = 24  # query vectors of one item: a few tiles
_BLOCK_TILES = 8
_BLOCK = _BLOCK_TILES * LANES
_MASKED = np.float32(-1e30)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


class Items(NamedTuple):
    """A batch cut into items; arrays are int32 [size]."""

    size: int
    rows: Address  # each item's row of `tables`
    first_tokens: Address  # index of each item's first token in the batch
    first_positions: Address  # position of that token in its sequence
    tokens: Address  # number of tokens of each item
    max_queries: int  # query vectors of an item
    tables: Address  # block tables: int32 [rows, width]
    width: int


class AttendPages(NamedTuple):
    """Causal attention of rotated queries over their sequences' pages. A chunk is an item and a KV head."""

    rows: int  # tokens
    items: Items
    pages: Pages
    qkv: Address  # fp32 [rows, (heads + 2 kv_heads) * head_dim]
    heads_per_kv_head: int
    out: Address  # fp32 [rows, heads * head_dim]
    scale: float  # of scores
    window: int  # tokens that a query sees, up to its own
    score_cap: float  # scores s become cap * tanh(s / cap); 0: they do not
    sinks: Address  # fp32 [sink_heads]: a score of each query head that has no value
    sink_heads: int  # query heads, or 0: there are none


_read = reader(AttendPages)


@njit(nogil=True, fastmath=FLAGS)
def _softmax_block(scores: Array, highest: Array, total: Array, acc: Array, rows: int) -> None:
    """Turn scores [rows, _BLOCK] into weights exp(score - maximum), and add these to the running sum.

    Raises the running maximum first, and rescales the running sum and result to it.
    """
    for r in range(rows):
        top = max(highest[r], largest(scores[r]))
        if top != highest[r]:
            rescale = exp32(highest[r] - top)
            highest[r] = top
            total[r] *= rescale
            for d in range(acc.shape[1]):
                acc[r, d] *= rescale
        part = _ZERO
        for j in range(_BLOCK):
            weight = exp32(scores[r, j] - top)
            scores[r, j] = weight
            part += weight
        total[r] += part


@njit(nogil=True, error_model="numpy", fastmath=FLAGS)
def _cap_scores(scores: Array, tile: int, cap: np.float32, rows: int) -> None:
    """Cap a tile of scores [rows, _BLOCK]."""
    for r in range(rows):
        for j in range(tile * LANES, (tile + 1) * LANES):
            scores[r, j] = cap * tanh32(scores[r, j] / cap)


@njit(nogil=True, fastmath=FLAGS)
def _add_sink(sink: np.float32, highest: Array, total: Array, acc: Array, r: int) -> None:
    """Add the weight of a sink to the sum of a query's weights, rescaled where it is the highest score."""
    if sink > highest[r]:
        rescale = exp32(highest[r] - sink)
        highest[r] = sink
        total[r] *= rescale
        for d in range(acc.shape[1]):
            acc[r, d] *= rescale
    total[r] += exp32(sink - highest[r])


@njit(nogil=True, fastmath=FLAGS)
def _attend_item(
    queries: Array,
    rows: int,
    group: int,
    position: int,
    table: Ints,
    head: int,
    window: int,
    cap: np.float32,
    pages: Pages,
    scores: Array,
    acc: Array,
    highest: Array,
    total: Array,
) -> None:
    """Attention of one item: `rows` query vectors, `group` per position from `position` on.

    A query sees `window` positions up to its own. Overwrites `acc` with the weighted sums of values, not yet
    divided by `total`; sets `highest` and `total`.
    """
    page_size, per_page = pages.page_size, page_tiles(pages)
    length = position + rows // group  # number of keys that the last query sees
    tiles = length // page_size * per_page + (length % page_size + LANES - 1) // LANES
    begin = max(position + 1 - window, 0)  # what the first query sees first
    begin_tile = begin // page_size * per_page + begin % page_size // LANES
    last_begin = length - window  # what the last query sees first
    score_stride, acc_stride, query_bytes = 4 * _BLOCK, 4 * acc.shape[1], 4 * pages.head_dim
    for r in range(rows):
        highest[r] = _MASKED
        total[r] = _ZERO
        for d in range(acc.shape[1]):
            acc[r, d] = _ZERO
    together = tile_rows(rows)
    values, scales = np.empty(_BLOCK_TILES, np.int64), np.empty(_BLOCK_TILES, np.int64)  # their addresses
    used = np.empty(_BLOCK_TILES, np.int64)  # positions of each tile that the last query sees
    # Index of the page in the table, and of the tile in the page.
    at, tile = begin_tile // per_page, begin_tile % per_page
    for block in range(begin_tile // _BLOCK_TILES * _BLOCK_TILES, tiles, _BLOCK_TILES):
        count, skipped = min(_BLOCK_TILES, tiles - block), max(begin_tile - block, 0)
        for b in range(skipped, count):
            first = at * page_size + tile * LANES
            lanes = min(LANES, page_size - tile * LANES)
            keys = key_tile(pages, table[at], head, tile)
            values[b] = value_panel(pages, table[at], head, 0, tile * LANES)
            scales[b] = tile_scales(pages, table[at], head, tile)
            used[b] = min(lanes, length - first)
            # Hardware does not prefetch across pages: prefetch these values and the next keys.
            prefetch_values(pages, table[at], head, tile * LANES, used[b])
            tile += 1
            if tile == per_page:
                at, tile = at + 1, 0
            if block + b + 1 < tiles:
                prefetch_keys(pages, table[at], head, tile)
            for r in range(0, rows, together):
                to = scores.ctypes.data + r * score_stride + b * RESULT_BYTES
                asked = queries.ctypes.data + r * query_bytes
                put_scores(pages, asked, keys, scales[b], to, score_stride, min(together, rows - r))
            if cap > _ZERO:
                _cap_scores(scores, b, cap, rows)
            if first + LANES - 1 > position or lanes < LANES:
                for r in range(rows):
                    visible = min(lanes, position + r // group + 1 - first)
                    for j in range(max(visible, 0), LANES):
                        scores[r, b * LANES + j] = _MASKED
            if first < last_begin:
                for r in range(rows):
                    hidden = position + r // group + 1 - window - first
                    for j in range(min(hidden, LANES)):
                        scores[r, b * LANES + j] = _MASKED
        for r in range(rows):
            for j in range(skipped * LANES):
                scores[r, j] = _MASKED
            for j in range(count * LANES, _BLOCK):
                scores[r, j] = _MASKED
        _softmax_block(scores, highest, total, acc, rows)
        for b in range(skipped, count):
            for r in range(0, rows, together):
                weights = scores.ctypes.data + r * score_stride + b * RESULT_BYTES
                to, take = acc.ctypes.data + r * acc_stride, min(together, rows - r)
                add_values(pages, weights, score_stride, values[b], scales[b], used[b], to, acc_stride, take)


@njit(nogil=True)
def _count_chunks(record: int) -> int:
    call = _read(record)
    return call.items.size * call.pages.kv_heads


@njit(nogil=True, fastmath=FLAGS)
def _compute_chunk(record: int, chunk: int) -> None:
    call = _read(record)
    rows, pages, group, items = call.rows, call.pages, call.heads_per_kv_head, call.items
    kv_heads, dim, max_queries = pages.kv_heads, pages.head_dim, items.max_queries
    qkv = matrix(call.qkv, rows, (group + 2) * kv_heads * dim)
    out = matrix(call.out, rows, group * kv_heads * dim)
    # From the last item on, because the later items of a long prompt see more keys.
    item, head = items.size - 1 - chunk // kv_heads, chunk % kv_heads
    first_token = ints(items.first_tokens, items.size)[item]
    position = ints(items.first_positions, items.size)[item]
    queries_of_item = ints(items.tokens, items.size)[item] * group
    table = ints(items.tables + 4 * ints(items.rows, items.size)[item] * items.width, items.width)
    queries = np.empty((max_queries, dim), np.float32)
    scores = np.empty((max_queries, _BLOCK), np.float32)
    acc = np.empty((max_queries, dim_panels(pages) * LANES), np.float32)
    highest = np.empty(max_queries, np.float32)
    total = np.empty(max_queries, np.float32)
    sinks = floats(call.sinks, call.sink_heads)
    scale = np.float32(call.scale)
    for r in range(queries_of_item):
        column = (head * group + r % group) * dim
        for d in range(dim):
            queries[r, d] = qkv[first_token + r // group, column + d] * scale
    _attend_item(
        queries,
        queries_of_item,
        group,
        position,
        table,
        head,
        call.window,
        np.float32(call.score_cap),
        pages,
        scores,
        acc,
        highest,
        total,
    )
    for r in range(queries_of_item):
        column = (head * group + r % group) * dim
        if call.sink_heads and highest[r] > _MASKED:
            _add_sink(sinks[head * group + r % group], highest, total, acc, r)
        # Scores that are all -inf come from an infinite query: its result is NaN, so that it is noticed.
        share = _ONE / total[r] if highest[r] > _MASKED else np.float32(np.nan)
        for d in range(dim):
            out[first_token + r // group, column + d] = acc[r, d] * share


ATTEND_PAGES = Kernel(AttendPages, _count_chunks, _compute_chunk)
