"""Linear layers in fp32 on CPU: weights packed once into panels, walked by `tile`'s micro-kernel.

Measured on 2 Zen 3 cores with the default model's shapes against what torch offers (F.linear, transposed
weights, oneDNN prepacked): ahead of all of them from 1 to 256 rows, and the only one whose rows are bitwise
the same for every number of rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.atomic import load, matrix
from executor_service.backends.torch_backend.cpu.registers import LANES, MOST_ROWS, tile_panels, tile_rows
from executor_service.backends.torch_backend.cpu.tile_fp32 import PANEL_ROW_BYTES, add_tile, put_tile
from executor_service.backends.torch_backend.cpu.vector_math import FLAGS, silu32

Array = NDArray[np.float32]

_PAIRS = 2  # of panels at once, at most
_BLOCK_ROWS = 96  # of X, that stay in the second-level cache while a chunk of W passes by


@njit(nogil=True)
def multiply_chunk(arguments: int, chunk: int) -> None:
    """A chunk of out (+)= X W^T.

    Arguments: rows, X [rows, k], W packed [panels, k, 16], out [rows, n], k, n, panels a chunk, add.
    """
    rows, x, w, out = load(arguments), load(arguments + 8), load(arguments + 16), load(arguments + 24)
    k, n = load(arguments + 32), load(arguments + 40)
    size, add = load(arguments + 48), load(arguments + 56) != 0
    panels, low = n // LANES, chunk * size
    count = min(size, panels - low)
    at, to = w + low * k * PANEL_ROW_BYTES, out + low * PANEL_ROW_BYTES
    if count > 0:
        _multiply_panels(x, rows, at, count, k, to, 4 * n, add)
    if n % LANES and low + size >= panels + 1:  # the last chunk has the last panel
        _multiply_ragged(x, w, out, rows, k, n, add)


@njit(nogil=True)
def _multiply_panels(
    x: int, rows: int, w: int, panels: int, k: int, out: int, out_stride: int, add: bool
) -> None:
    """out (+)= X W for some panels, a block of rows after the other."""
    x_stride, panel_bytes = 4 * k, k * PANEL_ROW_BYTES
    for block in range(0, rows, _BLOCK_ROWS):
        last = min(block + _BLOCK_ROWS, rows)
        together = tile_panels(last - block)
        for p in range(0, panels, together):
            count, from_w, r = min(together, panels - p), w + p * panel_bytes, block
            while r < last:
                take = tile_rows(last - r)
                from_x, to = x + r * x_stride, out + r * out_stride + p * PANEL_ROW_BYTES
                if add:
                    add_tile(from_x, x_stride, from_w, panel_bytes, count, k, to, out_stride, take)
                else:
                    put_tile(from_x, x_stride, from_w, panel_bytes, count, k, to, out_stride, take)
                r += take


@njit(nogil=True)
def _multiply_ragged(x: int, w: int, out: int, rows: int, k: int, n: int, add: bool) -> None:
    """The last panel, of which only some columns are real, through a buffer."""
    buffer, result = np.empty((rows, LANES), np.float32), matrix(out, rows, n)
    first, panel = n - n % LANES, w + n // LANES * k * PANEL_ROW_BYTES
    r = 0
    while r < rows:
        take = tile_rows(rows - r)
        to = buffer.ctypes.data + r * PANEL_ROW_BYTES
        put_tile(x + 4 * r * k, 4 * k, panel, 0, 1, k, to, PANEL_ROW_BYTES, take)
        r += take
    for r in range(rows):
        for j in range(n - first):
            result[r, first + j] = (result[r, first + j] if add else np.float32(0.0)) + buffer[r, j]


@njit(nogil=True, fastmath=FLAGS)
def gated_chunk(arguments: int, chunk: int) -> None:
    """A chunk of out = silu(X G^T) * (X U^T).

    Arguments: rows, X [rows, k], W packed with the panels of G and U taking turns, out [rows, n], k, n, pairs
    of panels a chunk.
    """
    rows, x, w = load(arguments), load(arguments + 8), load(arguments + 16)
    k, n, size = load(arguments + 32), load(arguments + 40), load(arguments + 48)
    out = matrix(load(arguments + 24), rows, n)
    buffer = np.empty((MOST_ROWS, _PAIRS * 2 * LANES), np.float32)
    low, high = chunk * size, min((chunk + 1) * size, (n + LANES - 1) // LANES)
    for block in range(0, rows, _BLOCK_ROWS):
        last = min(block + _BLOCK_ROWS, rows)
        p = low
        while p < high:
            pairs = min(max(tile_panels(last - block) // 2, 1), high - p)
            r = block
            while r < last:
                take = tile_rows(last - r)
                from_w = w + 2 * p * k * PANEL_ROW_BYTES
                _gated_tile(x + 4 * r * k, from_w, k, take, pairs, buffer, out, r, p * LANES)
                r += take
            p += pairs


@njit(nogil=True, fastmath=FLAGS)
def _gated_tile(
    x: int, w: int, k: int, rows: int, pairs: int, buffer: Array, out: Array, first: int, column: int
) -> None:
    """A tile's rows by some pairs of panels, through a buffer of theirs, to out[first:, column:]."""
    put_tile(x, 4 * k, w, k * PANEL_ROW_BYTES, 2 * pairs, k, buffer.ctypes.data, 4 * buffer.shape[1], rows)
    for i in range(rows):
        for g in range(pairs):
            start = column + g * LANES
            for j in range(min(LANES, out.shape[1] - start)):
                gate, up = buffer[i, 2 * g * LANES + j], buffer[i, (2 * g + 1) * LANES + j]
                out[first + i, start + j] = silu32(gate) * up
