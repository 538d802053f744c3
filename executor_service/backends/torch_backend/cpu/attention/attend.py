"""Paged attention on CPU, in fp32 over `pages`, once `rotate` has written K and V there.

Work is split into items: up to 24 query vectors of one sequence, some positions x the heads that share a KV
head (one position if these are more). An item walks the keys in blocks of 8 tiles from position 0, with an
online softmax (Milakov, Gimelshein 2018). Block borders depend on positions alone, and masked keys add exact
zeros: **a query's result depends neither on its neighbours nor on how its sequence was cut into chunks**, as
long as the sequence is finite; where it is not, results that see it show that. Slots that were never written,
which may hold NaN, are not multiplied.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.attention.pages import (
    Pages,
    add_values,
    dim_panels,
    key_tile,
    page_tiles,
    pages_of,
    prefetch_keys,
    prefetch_values,
    put_scores,
    value_panel,
)
from executor_service.backends.torch_backend.cpu.gemm.tile import RESULT_BYTES
from executor_service.backends.torch_backend.cpu.primitives.memory import ints, load, matrix
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES, tile_rows
from executor_service.backends.torch_backend.cpu.primitives.vector_math import (
    FLAGS,
    exp32,
    float_of_bits,
)

Array = NDArray[np.float32]
Ints = NDArray[np.int32]

ITEM_ROWS = 24  # query vectors of one item: a few tiles
_BLOCK_TILES = 8
_BLOCK = _BLOCK_TILES * LANES
_MASKED = np.float32(-1e30)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@njit(nogil=True)
def _ordered(bits: np.int32) -> np.int32:
    """The bits of an fp32 to an int32 that compares as it does, and back; NaN is above or below all."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(nogil=True)
def _largest(scores: Array) -> np.float32:
    """The largest of [_BLOCK] scores, by integers: maxima of floats are not vectorized, for NaN's sake."""
    bits = scores.view(np.int32)
    top = _ordered(bits[0])
    for j in range(1, _BLOCK):
        one = _ordered(bits[j])
        top = one if one > top else top
    return float_of_bits(_ordered(top))


@njit(nogil=True, fastmath=FLAGS)
def _softmax_block(scores: Array, highest: Array, total: Array, acc: Array, rows: int) -> None:
    """Scores [rows, _BLOCK] become weights; the running maximum, sum and result are rescaled."""
    for r in range(rows):
        top = max(highest[r], _largest(scores[r]))
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


@njit(nogil=True, fastmath=FLAGS)
def _attend_item(
    queries: Array,
    rows: int,
    group: int,
    position: int,
    table: Ints,
    head: int,
    pages: Pages,
    scores: Array,
    acc: Array,
    highest: Array,
    total: Array,
) -> None:
    """One item: `rows` query vectors, `group` for each position from `position` on; results to `acc`."""
    page_size, per_page = pages.page_size, page_tiles(pages)
    length = position + rows // group  # keys that the last query sees
    tiles = length // page_size * per_page + (length % page_size + LANES - 1) // LANES
    score_stride, acc_stride, query_bytes = 4 * _BLOCK, 4 * acc.shape[1], 4 * pages.head_dim
    for r in range(rows):
        highest[r] = _MASKED
        total[r] = _ZERO
        for d in range(acc.shape[1]):
            acc[r, d] = _ZERO
    together = tile_rows(rows)
    values = np.empty(_BLOCK_TILES, np.int64)  # their addresses
    used = np.empty(_BLOCK_TILES, np.int64)  # how many positions of a tile the last query sees
    at, tile = 0, 0  # which page of the table, and which tile of it
    for block in range(0, tiles, _BLOCK_TILES):
        count = min(_BLOCK_TILES, tiles - block)
        for b in range(count):
            first = at * page_size + tile * LANES
            lanes = min(LANES, page_size - tile * LANES)
            keys = key_tile(pages, table[at], head, tile)
            values[b] = value_panel(pages, table[at], head, 0, tile * LANES)
            used[b] = min(lanes, length - first)
            # Pages lie apart, where no hardware looks ahead: ask for these values, and for the next keys.
            prefetch_values(pages, table[at], head, tile * LANES, used[b])
            tile += 1
            if tile == per_page:
                at, tile = at + 1, 0
            if block + b + 1 < tiles:
                prefetch_keys(pages, table[at], head, tile)
            for r in range(0, rows, together):
                to = scores.ctypes.data + r * score_stride + b * RESULT_BYTES
                asked = queries.ctypes.data + r * query_bytes
                put_scores(pages, asked, keys, to, score_stride, min(together, rows - r))
            if first + LANES - 1 > position or lanes < LANES:
                for r in range(rows):
                    visible = min(lanes, position + r // group + 1 - first)
                    for j in range(max(visible, 0), LANES):
                        scores[r, b * LANES + j] = _MASKED
        for r in range(rows):
            for j in range(count * LANES, _BLOCK):
                scores[r, j] = _MASKED
        _softmax_block(scores, highest, total, acc, rows)
        for b in range(count):
            for r in range(0, rows, together):
                weights = scores.ctypes.data + r * score_stride + b * RESULT_BYTES
                to, take = acc.ctypes.data + r * acc_stride, min(together, rows - r)
                add_values(pages, weights, score_stride, values[b], used[b], to, acc_stride, take)


@njit(nogil=True, fastmath=FLAGS)
def attend_chunk(arguments: int, chunk: int) -> None:
    """One item and KV head of the causal attention of rotated queries over their sequences' pages.

    Arguments: as of `rotate_chunk` up to head_dim; out [tokens, heads * head_dim]. The batch is int64: int32
    [tokens] each, the tokens' positions, pages and slots; block tables int32 [rows, width]; width; items
    int32 [4, items] (row, first flat token, its position, count); items; most query vectors of an item.
    """
    tokens, batch, pages = load(arguments), load(arguments + 8), pages_of(arguments)
    kv_heads, group, dim = pages.kv_heads, load(arguments + 64), pages.head_dim
    width, items, most = load(batch + 32), load(batch + 48), load(batch + 56)
    qkv = matrix(load(arguments + 48), tokens, (group + 2) * kv_heads * dim)
    out = matrix(load(arguments + 80), tokens, group * kv_heads * dim)
    # From the end: the later items of a long chunk see more keys.
    item, head = items - 1 - chunk // kv_heads, chunk % kv_heads
    described = ints(load(batch + 40), 4 * items)
    row, token = described[item], described[items + item]
    position, rows = described[2 * items + item], described[3 * items + item] * group
    table = ints(load(batch + 24) + 4 * row * width, width)
    queries = np.empty((most, dim), np.float32)
    scores = np.empty((most, _BLOCK), np.float32)
    acc = np.empty((most, dim_panels(pages) * LANES), np.float32)
    highest = np.empty(most, np.float32)
    total = np.empty(most, np.float32)
    scale = _ONE / np.sqrt(np.float32(dim))
    for r in range(rows):
        column = (head * group + r % group) * dim
        for d in range(dim):
            queries[r, d] = qkv[token + r // group, column + d] * scale
    _attend_item(queries, rows, group, position, table, head, pages, scores, acc, highest, total)
    for r in range(rows):
        column = (head * group + r % group) * dim
        # A query all of whose scores are -inf, as an infinite one's may be, must show.
        share = _ONE / total[r] if highest[r] > _MASKED else np.float32(np.nan)
        for d in range(dim):
            out[token + r // group, column + d] = acc[r, d] * share
