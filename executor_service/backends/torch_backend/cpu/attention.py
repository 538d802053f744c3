"""Paged attention in fp32 on CPU, and what prepares it: rotation and the write of K and V into pages.

Layout, for `tile`'s micro-kernel: K lies as [pages, kv_heads, tiles, head_dim, 16], where a tile holds 16
positions of a page side by side; V lies as [pages, kv_heads, dim_tiles, page_size, 16]. So Q K^T and P V
are both products of a few rows with panels, read in place.

Work is split into items: up to 24 query vectors (some positions x the heads that share a KV head) of one
sequence. An item walks the keys in blocks of 8 tiles from position 0, with an online softmax (Milakov,
Gimelshein 2018). Block borders depend on positions alone, and masked keys add exact zeros: **a query's
result depends neither on its neighbours nor on how its sequence was cut into chunks**. Slots that were
never written, which may hold NaN, are not multiplied.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.atomic import carray, floats, ints, load, matrix, pointer
from executor_service.backends.torch_backend.cpu.registers import LANES, tile_rows
from executor_service.backends.torch_backend.cpu.rows import ROWS_AT_ONCE, inverse_norm
from executor_service.backends.torch_backend.cpu.tile_fp32 import (
    PANEL_ROW_BYTES,
    add_tile,
    prefetch_panel,
    put_tile,
)
from executor_service.backends.torch_backend.cpu.vector_math import FLAGS, exp32, float_of_bits

Array = NDArray[np.float32]
Ints = NDArray[np.int32]

ITEM_ROWS = 24  # query vectors of one item: a few tiles
_BLOCK_TILES = 8
_BLOCK = _BLOCK_TILES * LANES
_MASKED = np.float32(-1e30)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@njit(nogil=True)
def _norm_head(head: Array, norm: Array, eps: np.float32) -> None:
    """RMSNorm of one head's vector, in place, where `norm` is not empty."""
    if norm.shape[0]:
        scale = inverse_norm(head, eps)
        for d in range(head.shape[0]):
            head[d] = head[d] * scale * norm[d]


@njit(nogil=True, fastmath=FLAGS)
def _rotate_head(head: Array, cos: Array, sin: Array, norm: Array, eps: np.float32) -> None:
    """RMSNorm and rotation of one head's vector, in place."""
    _norm_head(head, norm, eps)
    half = cos.shape[0]
    for d in range(half):
        a, b = head[d], head[d + half]
        head[d] = a * cos[d] - b * sin[d]
        head[d + half] = b * cos[d] + a * sin[d]


@njit(nogil=True, fastmath=FLAGS)
def _store_token(
    qkv: Array,
    cos: Array,
    sin: Array,
    k_norm: Array,
    eps: np.float32,
    k_page: Array,
    v_page: Array,
    slot: int,
) -> None:
    """Rotate one token's keys and write its keys and values into their slot."""
    kv_heads, dim = k_page.shape[0], k_page.shape[2]
    first = qkv.shape[0] - 2 * kv_heads * dim
    tile, lane = slot // LANES, slot % LANES
    for h in range(kv_heads):
        key = qkv[first + h * dim : first + (h + 1) * dim]
        _rotate_head(key, cos, sin, k_norm, eps)
        value = qkv[first + (kv_heads + h) * dim : first + (kv_heads + h + 1) * dim]
        for d in range(dim):
            k_page[h, tile, d, lane] = key[d]
        for d in range(dim):
            v_page[h, d // LANES, slot, d % LANES] = value[d]


@njit(nogil=True, fastmath=FLAGS)
def rotate_chunk(arguments: int, chunk: int) -> None:
    """Some tokens' q and k are rotated in place (after their norms, if any), k and v written into the cache.

    Arguments: tokens; the batch, see `attend_chunk`; K and V caches, their pages and page_size; qkv [tokens,
    (heads + 2 kv_heads) * head_dim]; kv_heads, heads per KV head, head_dim; cos, sin [context, head_dim / 2];
    context; the norms of q and k [size]; size: head_dim, or 0 where there are none; the bits of eps.
    """
    tokens, batch, pages, page_size = (
        load(arguments),
        load(arguments + 8),
        load(arguments + 32),
        load(arguments + 40),
    )
    kv_heads, group, dim = load(arguments + 56), load(arguments + 64), load(arguments + 72)
    qkv = matrix(load(arguments + 48), tokens, (group + 2) * kv_heads * dim)
    context, size = load(arguments + 96), load(arguments + 120)
    cos = matrix(load(arguments + 80), context, dim // 2)
    sin = matrix(load(arguments + 88), context, dim // 2)
    q_norm, k_norm = floats(load(arguments + 104), size), floats(load(arguments + 112), size)
    eps = float_of_bits(np.int32(load(arguments + 128)))
    k_cache, v_cache = _caches(arguments, pages, kv_heads, dim, page_size)
    positions, page_of = ints(load(batch), tokens), ints(load(batch + 8), tokens)
    slots = ints(load(batch + 16), tokens)
    for t in range(chunk * ROWS_AT_ONCE, min((chunk + 1) * ROWS_AT_ONCE, tokens)):
        p = positions[t]
        for h in range(group * kv_heads):
            _rotate_head(qkv[t, h * dim : (h + 1) * dim], cos[p], sin[p], q_norm, eps)
        page = page_of[t]
        _store_token(qkv[t], cos[p], sin[p], k_norm, eps, k_cache[page], v_cache[page], slots[t])


@njit(nogil=True)
def _caches(arguments: int, pages: int, kv_heads: int, dim: int, page_size: int) -> tuple[Array, Array]:
    tiles, dim_tiles = (page_size + LANES - 1) // LANES, (dim + LANES - 1) // LANES
    k_shape, v_shape = (pages, kv_heads, tiles, dim, LANES), (pages, kv_heads, dim_tiles, page_size, LANES)
    return (
        carray(pointer(load(arguments + 16)), k_shape, np.float32),
        carray(pointer(load(arguments + 24)), v_shape, np.float32),
    )


@njit(nogil=True, fastmath=FLAGS)
def _softmax_block(scores: Array, tiles: int, highest: Array, total: Array, acc: Array, rows: int) -> None:
    """Scores [rows, tiles * 16] become weights; the running maximum, sum and result are rescaled."""
    for r in range(rows):
        top = highest[r]
        for j in range(tiles * LANES):
            top = max(top, scores[r, j])
        rescale = exp32(highest[r] - top)
        highest[r] = top
        total[r] *= rescale
        for d in range(acc.shape[1]):
            acc[r, d] *= rescale
        for b in range(tiles):
            part = _ZERO
            for j in range(b * LANES, (b + 1) * LANES):
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
    k_cache: Array,
    v_cache: Array,
    scores: Array,
    acc: Array,
    highest: Array,
    total: Array,
) -> None:
    """One item: `rows` query vectors, `group` for each position from `position` on; results to `acc`."""
    dim, dim_tiles, page_size = k_cache.shape[3], v_cache.shape[2], v_cache.shape[3]
    page_tiles = k_cache.shape[2]
    length = position + rows // group  # keys that the last query sees
    tiles = length // page_size * page_tiles + (length % page_size + LANES - 1) // LANES
    score_stride, acc_stride, v_stride = 4 * _BLOCK, 4 * acc.shape[1], page_size * PANEL_ROW_BYTES
    for r in range(rows):
        highest[r] = _MASKED
        total[r] = _ZERO
        for d in range(acc.shape[1]):
            acc[r, d] = _ZERO
    for block in range(0, tiles, _BLOCK_TILES):
        count = min(_BLOCK_TILES, tiles - block)
        for b in range(count):
            page, tile = table[(block + b) // page_tiles], (block + b) % page_tiles
            first = (block + b) // page_tiles * page_size + tile * LANES
            lanes = min(LANES, page_size - tile * LANES)
            keys = k_cache[page, head, tile].ctypes.data
            # Pages lie apart, where no hardware looks ahead: ask for the next keys, and for these values.
            if block + b + 1 < tiles:
                page_after, tile_after = table[(block + b + 1) // page_tiles], (block + b + 1) % page_tiles
                prefetch_panel(k_cache[page_after, head, tile_after].ctypes.data, dim)
            for d in range(dim_tiles):
                prefetch_panel(
                    v_cache[page, head, d].ctypes.data + tile * LANES * PANEL_ROW_BYTES,
                    min(lanes, length - first),
                )
            r = 0
            while r < rows:
                take = tile_rows(rows - r)
                to = scores.ctypes.data + r * score_stride + b * PANEL_ROW_BYTES
                put_tile(queries.ctypes.data + 4 * r * dim, 4 * dim, keys, 0, 1, dim, to, score_stride, take)
                r += take
            if first + LANES - 1 > position or lanes < LANES:
                for r in range(rows):
                    visible = min(lanes, position + r // group + 1 - first)
                    for j in range(max(visible, 0), LANES):
                        scores[r, b * LANES + j] = _MASKED
        _softmax_block(scores, count, highest, total, acc, rows)
        for b in range(count):
            page, tile = table[(block + b) // page_tiles], (block + b) % page_tiles
            first = (block + b) // page_tiles * page_size + tile * LANES
            used = min(min(LANES, page_size - tile * LANES), length - first)
            values, r = v_cache[page, head].ctypes.data + tile * LANES * PANEL_ROW_BYTES, 0
            while r < rows:
                take = tile_rows(rows - r)
                weights = scores.ctypes.data + r * score_stride + b * PANEL_ROW_BYTES
                to = acc.ctypes.data + r * acc_stride
                add_tile(weights, score_stride, values, v_stride, dim_tiles, used, to, acc_stride, take)
                r += take


@njit(nogil=True, fastmath=FLAGS)
def attend_chunk(arguments: int, chunk: int) -> None:
    """One item and KV head of the causal attention of rotated queries over their sequences' pages.

    Arguments: as of `rotate_chunk` up to head_dim; out [tokens, heads * head_dim]. The batch is int64: int32
    [tokens] each, the tokens' positions, pages and slots; block tables int32 [rows, width]; width; items
    int32 [4, items] (row, first flat token, its position, count); items; most query vectors of an item.
    """
    tokens, batch = load(arguments), load(arguments + 8)
    pages, page_size = load(arguments + 32), load(arguments + 40)
    kv_heads, group, dim = load(arguments + 56), load(arguments + 64), load(arguments + 72)
    width, items, most = load(batch + 32), load(batch + 48), load(batch + 56)
    dim_tiles = (dim + LANES - 1) // LANES
    qkv = matrix(load(arguments + 48), tokens, (group + 2) * kv_heads * dim)
    k_cache, v_cache = _caches(arguments, pages, kv_heads, dim, page_size)
    out = matrix(load(arguments + 80), tokens, group * kv_heads * dim)
    # From the end: the later items of a long chunk see more keys.
    item, head = items - 1 - chunk // kv_heads, chunk % kv_heads
    described = ints(load(batch + 40), 4 * items)
    row, token = described[item], described[items + item]
    position, rows = described[2 * items + item], described[3 * items + item] * group
    table = ints(load(batch + 24) + 4 * row * width, width)
    queries = np.empty((most, dim), np.float32)
    scores = np.empty((most, _BLOCK), np.float32)
    acc = np.empty((most, dim_tiles * LANES), np.float32)
    highest = np.empty(most, np.float32)
    total = np.empty(most, np.float32)
    scale = _ONE / np.sqrt(np.float32(dim))
    for r in range(rows):
        column = (head * group + r % group) * dim
        for d in range(dim):
            queries[r, d] = qkv[token + r // group, column + d] * scale
    _attend_item(queries, rows, group, position, table, head, k_cache, v_cache, scores, acc, highest, total)
    for r in range(rows):
        column = (head * group + r % group) * dim
        share = _ONE / total[r]
        for d in range(dim):
            out[token + r // group, column + d] = acc[r, d] * share
