"""Keys and values of one layer in pages, in fp32 or fp16: their layout, and products with them.

K is [pages, kv_heads, tiles, head_dim, 16], where a tile holds 16 positions of a page; V is [pages, kv_heads,
dim_tiles, page_size, 16]. So both Q K^T and P V are products of a few rows with panels as in `gemm/tile.py`,
which are read in place.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.gemm import tile_fp16
from executor_service.backends.torch_backend.cpu.gemm import tile_fp32 as wide
from executor_service.backends.torch_backend.cpu.gemm.tile import prefetch
from executor_service.backends.torch_backend.cpu.primitives.records import Address, address_of
from executor_service.backends.torch_backend.cpu.primitives.registers import CONVERTS_FP16, LANES
from executor_service.backends.torch_backend.kernels import LayerCache

NARROWEST = torch.float16 if CONVERTS_FP16 else torch.float32
"""The narrowest type that pages can have on this processor."""

# tile_fp16 does not compile without the processor's fp16 conversions.
narrow: ModuleType = tile_fp16 if CONVERTS_FP16 else wide

_CACHE_LINE = 64  # bytes
_FP16_INFINITE = np.float32(65_520)  # from here on numbers are rounded to infinity


class Pages(NamedTuple):
    """Storage of one layer, part of the records of calls."""

    k: Address
    v: Address
    value_bytes: int  # 4: fp32; 2: fp16
    page_size: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, cache: LayerCache) -> Pages:
        """The record of a cache that `new_layer_cache` made."""
        kv_heads, head_dim = cache.k.shape[1], cache.k.shape[3]
        return cls(
            address_of(cache.k), address_of(cache.v), cache.v.itemsize, cache.v.shape[3], kv_heads, head_dim
        )


def new_layer_cache(
    pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> LayerCache:
    """Pages of zeros, in this file's layout."""
    tiles, dim_tiles = -(-page_size // LANES), -(-head_dim // LANES)
    return LayerCache(
        torch.zeros(pages, kv_heads, tiles, head_dim, LANES, dtype=dtype),
        torch.zeros(pages, kv_heads, dim_tiles, page_size, LANES, dtype=dtype),
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
def put_key(pages: Pages, page: int, slot: int, head: int, key: NDArray[np.float32]) -> None:
    """Write one position's key of one head, with NaN in place of infinity.

    An infinite key can have the score -inf, with which softmax would ignore it; NaN reaches the logits, where
    it is reported.
    """
    tile, lane = key_tile(pages, page, head, slot // LANES), slot % LANES
    infinite = _FP16_INFINITE if pages.value_bytes == 2 else np.float32(np.inf)
    for d in range(key.shape[0]):
        value = key[d] if abs(key[d]) < infinite else np.float32(np.nan)
        _put(pages, tile + (d * LANES + lane) * pages.value_bytes, value)


@njit(nogil=True)
def put_value(pages: Pages, page: int, slot: int, head: int, value: NDArray[np.float32]) -> None:
    """Write one position's value of one head."""
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
def put_scores(pages: Pages, queries: int, tile: int, scores: int, stride: int, rows: int) -> None:
    """Scores [rows, 16] = queries [rows, head_dim] times a tile of keys."""
    dim = pages.head_dim
    if pages.value_bytes == 2:
        narrow.put_tile(queries, 4 * dim, tile, 0, 1, dim, scores, stride, rows)
    else:
        wide.put_tile(queries, 4 * dim, tile, 0, 1, dim, scores, stride, rows)


@njit(nogil=True)
def add_values(
    pages: Pages, weights: int, stride: int, values: int, count: int, out: int, out_stride: int, rows: int
) -> None:
    """out [rows, head_dim padded to panels] += weights [rows, count] times the values of `count` slots."""
    panels = dim_panels(pages)
    apart = pages.page_size * LANES * pages.value_bytes
    if pages.value_bytes == 2:
        narrow.add_tile(weights, stride, values, apart, panels, count, out, out_stride, rows)
    else:
        wide.add_tile(weights, stride, values, apart, panels, count, out, out_stride, rows)


@njit(nogil=True)
def prefetch_keys(pages: Pages, page: int, head: int, tile: int) -> None:
    """Prefetch the keys of a tile."""
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
