"""Keys and values of one layer in pages, in fp32, fp16 or int8: their layout, and products with them.

K is [pages, kv_heads, tiles, head_dim, 16], where a tile holds 16 positions of a page; V is [pages, kv_heads,
dim_tiles, page_size, 16]. So both Q K^T and P V are products of a few rows with panels as in `gemm/tile.py`,
which are read in place. int8 has scales, bf16 [pages, kv_heads, tiles, 2, 16]: scores are multiplied by those
of the keys, and weights, before they meet the values, by those of the values.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.attention.scales import (
    KIND_BYTES,
    KINDS,
    SCALE_BYTES,
    put_byte,
    put_scale,
    scale_columns,
)
from executor_service.backends.torch_backend.cpu.gemm import tile_bytes, tile_fp16
from executor_service.backends.torch_backend.cpu.gemm import tile_fp32 as wide
from executor_service.backends.torch_backend.cpu.gemm.tile import prefetch
from executor_service.backends.torch_backend.cpu.primitives.records import Address, address_of
from executor_service.backends.torch_backend.cpu.primitives.registers import CONVERTS_FP16, LANES
from executor_service.backends.torch_backend.ops.page_format import (
    SCALE_DTYPE,
    LayerCache,
    page_storage,
    scale_count,
)

NARROWEST = torch.float16 if CONVERTS_FP16 else torch.float32
"""The narrowest type without scales that pages can have on this processor."""

# tile_fp16 does not compile without the processor's fp16 conversions.
narrow: ModuleType = tile_fp16 if CONVERTS_FP16 else wide

_CACHE_LINE = 64  # bytes
_FP16_INFINITE = np.float32(65_520)  # from here on numbers are rounded to infinity


class Pages(NamedTuple):
    """Storage of one layer, part of the records of calls."""

    k: Address
    v: Address
    scales: Address
    value_bytes: int  # 4: fp32; 2: fp16; 1: int8, the only one with scales
    page_size: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, cache: LayerCache) -> Pages:
        """The record of a cache that `new_layer_cache` made."""
        kv_heads, head_dim = cache.k.shape[1], cache.k.shape[3]
        k, v, scales = (address_of(tensor) for tensor in (cache.k, cache.v, cache.scales))
        return cls(k, v, scales, cache.v.itemsize, cache.v.shape[3], kv_heads, head_dim)


def new_layer_cache(
    pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> LayerCache:
    """Pages of zeros, in this file's layout."""
    tiles, dim_tiles = -(-page_size // LANES), -(-head_dim // LANES)
    cpu = torch.device("cpu")
    return LayerCache(
        page_storage(pages, kv_heads, tiles, head_dim, LANES, dtype=dtype, device=cpu),
        page_storage(pages, kv_heads, dim_tiles, page_size, LANES, dtype=dtype, device=cpu),
        page_storage(pages, kv_heads, tiles, scale_count(dtype), LANES, dtype=SCALE_DTYPE, device=cpu),
    )


@njit(nogil=True)
def page_tiles(pages: Pages) -> int:
    """Number of tiles of keys in a page."""
    return (pages.page_size + LANES - 1) // LANES


@njit(nogil=True)
def dim_panels(pages: Pages) -> int:
    """Number of panels of values in a page."""
    return (pages.head_dim + LANES - 1) // LANES


@njit(nogil=True)
def key_tile(pages: Pages, page: int, head: int, tile: int) -> int:
    """The address of 16 positions' keys."""
    tile_bytes = pages.head_dim * LANES * pages.value_bytes
    return pages.k + ((page * pages.kv_heads + head) * page_tiles(pages) + tile) * tile_bytes


@njit(nogil=True)
def value_panel(pages: Pages, page: int, head: int, panel: int, slot: int) -> int:
    """The address of a panel of values (16 dimensions) at a slot of the page."""
    row = ((page * pages.kv_heads + head) * dim_panels(pages) + panel) * pages.page_size + slot
    return pages.v + row * LANES * pages.value_bytes


@njit(nogil=True)
def tile_scales(pages: Pages, page: int, head: int, tile: int) -> int:
    """The address of the scales of 16 positions, if there are scales."""
    return pages.scales + ((page * pages.kv_heads + head) * page_tiles(pages) + tile) * KINDS * KIND_BYTES


@njit(nogil=True)
def _slot_scale(pages: Pages, page: int, slot: int, head: int) -> int:
    """The address of the scale of one position's key; that of its value is KIND_BYTES after it."""
    return tile_scales(pages, page, head, slot // LANES) + slot % LANES * SCALE_BYTES


@njit(nogil=True)
def put_key(pages: Pages, page: int, slot: int, head: int, key: NDArray[np.float32]) -> None:
    """Write one position's key of one head, with NaN in place of infinity.

    An infinite key can have the score -inf, with which softmax would ignore it; NaN reaches the logits, where
    it is reported.
    """
    tile, lane = key_tile(pages, page, head, slot // LANES), slot % LANES
    if pages.value_bytes == 1:
        scale = put_scale(_slot_scale(pages, page, slot, head), key)
        for d in range(key.shape[0]):
            put_byte(tile + d * LANES + lane, key[d], scale)
        return
    infinite = _FP16_INFINITE if pages.value_bytes == 2 else np.float32(np.inf)
    for d in range(key.shape[0]):
        value = key[d] if abs(key[d]) < infinite else np.float32(np.nan)
        _put(pages, tile + (d * LANES + lane) * pages.value_bytes, value)


@njit(nogil=True)
def put_value(pages: Pages, page: int, slot: int, head: int, value: NDArray[np.float32]) -> None:
    """Write one position's value of one head."""
    if pages.value_bytes == 1:
        scale = put_scale(_slot_scale(pages, page, slot, head) + KIND_BYTES, value)
        for d in range(value.shape[0]):
            put_byte(value_panel(pages, page, head, d // LANES, slot) + d % LANES, value[d], scale)
        return
    for d in range(value.shape[0]):
        panel = value_panel(pages, page, head, d // LANES, slot)
        _put(pages, panel + d % LANES * pages.value_bytes, value[d])


@njit(nogil=True)
def _put(pages: Pages, address: int, value: np.float32) -> None:
    if pages.value_bytes == 2:
        narrow.store(address, value)
    else:
        wide.store(address, value)


@njit(nogil=True)
def put_scores(
    pages: Pages, queries: int, tile: int, scales: int, scores: int, stride: int, rows: int
) -> None:
    """Scores [rows, 16] = queries [rows, head_dim] times a tile of keys, whose `tile_scales` are given."""
    dim = pages.head_dim
    if pages.value_bytes == 1:
        tile_bytes.put_tile(queries, 4 * dim, tile, 0, 1, dim, scores, stride, rows)
        scale_columns(scores, stride, rows, scales)
    elif pages.value_bytes == 2:
        narrow.put_tile(queries, 4 * dim, tile, 0, 1, dim, scores, stride, rows)
    else:
        wide.put_tile(queries, 4 * dim, tile, 0, 1, dim, scores, stride, rows)


@njit(nogil=True)
def add_values(
    pages: Pages,
    weights: int,
    stride: int,
    values: int,
    scales: int,
    count: int,
    out: int,
    out_stride: int,
    rows: int,
) -> None:
    """out [rows, head_dim padded to panels] += weights [rows, count] times the values of `count` slots.

    `scales`: the `tile_scales` of these slots. May overwrite weights [rows, 16].
    """
    panels = dim_panels(pages)
    apart = pages.page_size * LANES * pages.value_bytes
    if pages.value_bytes == 1:
        scale_columns(weights, stride, rows, scales + KIND_BYTES)
        tile_bytes.add_tile(weights, stride, values, apart, panels, count, out, out_stride, rows)
    elif pages.value_bytes == 2:
        narrow.add_tile(weights, stride, values, apart, panels, count, out, out_stride, rows)
    else:
        wide.add_tile(weights, stride, values, apart, panels, count, out, out_stride, rows)


@njit(nogil=True)
def prefetch_keys(pages: Pages, page: int, head: int, tile: int) -> None:
    """Prefetch the keys of a tile, and its scales."""
    if pages.value_bytes == 1:
        prefetch(tile_scales(pages, page, head, tile))
    _prefetch(key_tile(pages, page, head, tile), pages.head_dim * LANES * pages.value_bytes)


@njit(nogil=True)
def prefetch_values(pages: Pages, page: int, head: int, slot: int, count: int) -> None:
    """Prefetch the values of `count` slots."""
    for panel in range(dim_panels(pages)):
        _prefetch(value_panel(pages, page, head, panel, slot), count * LANES * pages.value_bytes)


@njit(nogil=True)
def _prefetch(address: int, size: int) -> None:
    for at in range(0, size, _CACHE_LINE):
        prefetch(address + at)
