"""Linear layers on CPU: weights packed once into panels, walked by `tile`'s micro-kernel.

Measured in fp32 on 2 Zen 3 cores with the default model's shapes against what torch offers (F.linear,
transposed weights, oneDNN prepacked): ahead of all of them from 1 to 256 rows, and the only one whose rows
are bitwise the same for every number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.gemm import tile_fp32, tile_int8
from executor_service.backends.torch_backend.cpu.gemm.tile import RESULT_BYTES, Product
from executor_service.backends.torch_backend.cpu.primitives.memory import load, matrix
from executor_service.backends.torch_backend.cpu.primitives.registers import (
    LANES,
    MOST_ROWS,
    tile_panels,
    tile_rows,
)
from executor_service.backends.torch_backend.cpu.primitives.vector_math import FLAGS, silu32

Array = NDArray[np.float32]
Chunk = Callable[[int, int], None]

_PAIRS = 2  # of panels at once, at most
_BLOCK_ROWS = 96  # of X, that stay in the second-level cache while a chunk of W passes by


def _make_multiply(put_tile: Product, add_tile: Product) -> Chunk:
    """What computes a chunk of out (+)= X W^T."""

    @njit(nogil=True)
    def panels_of(
        x: int,
        x_stride: int,
        rows: int,
        w: int,
        w_stride: int,
        panels: int,
        k: int,
        out: int,
        n: int,
        add: bool,
    ) -> None:
        """Whole panels, a block of rows after the other."""
        for block in range(0, rows, _BLOCK_ROWS):
            last = min(block + _BLOCK_ROWS, rows)
            together = tile_panels(last - block)
            for p in range(0, panels, together):
                count, from_w, r = min(together, panels - p), w + p * w_stride, block
                while r < last:
                    take = tile_rows(last - r)
                    from_x, to = x + r * x_stride, out + 4 * r * n + p * RESULT_BYTES
                    if add:
                        add_tile(from_x, x_stride, from_w, w_stride, count, k, to, 4 * n, take)
                    else:
                        put_tile(from_x, x_stride, from_w, w_stride, count, k, to, 4 * n, take)
                    r += take

    @njit(nogil=True)
    def ragged(
        x: int, x_stride: int, rows: int, panel: int, k: int, out: Array, first: int, add: bool
    ) -> None:
        """The last panel, of which only some columns are real, through a buffer."""
        buffer = np.empty((rows, LANES), np.float32)
        r = 0
        while r < rows:
            take = tile_rows(rows - r)
            to = buffer.ctypes.data + r * RESULT_BYTES
            put_tile(x + r * x_stride, x_stride, panel, 0, 1, k, to, RESULT_BYTES, take)
            r += take
        for r in range(rows):
            for j in range(out.shape[1] - first):
                out[r, first + j] = (out[r, first + j] if add else np.float32(0.0)) + buffer[r, j]

    @njit(nogil=True)
    def multiply_chunk(arguments: int, chunk: int) -> None:
        """A chunk of out (+)= X W^T.

        Arguments: rows; X and the bytes from row to row; W packed and the bytes from panel to panel; steps
        along K; out [rows, n]; n; panels a chunk; add.
        """
        rows, x, x_stride = load(arguments), load(arguments + 8), load(arguments + 16)
        w, w_stride, k = load(arguments + 24), load(arguments + 32), load(arguments + 40)
        out, n, size = load(arguments + 48), load(arguments + 56), load(arguments + 64)
        add = load(arguments + 72) != 0
        panels, low = n // LANES, chunk * size
        count = min(size, panels - low)
        if count > 0:
            to = out + low * RESULT_BYTES
            panels_of(x, x_stride, rows, w + low * w_stride, w_stride, count, k, to, n, add)
        if n % LANES and low + size >= panels + 1:  # the last chunk has the last panel
            ragged(x, x_stride, rows, w + panels * w_stride, k, matrix(out, rows, n), panels * LANES, add)

    return cast(Chunk, multiply_chunk)


def _make_gated(put_tile: Product) -> Chunk:
    """What computes a chunk of out = silu(X G^T) * (X U^T)."""

    @njit(nogil=True, fastmath=FLAGS)
    def gated_chunk(arguments: int, chunk: int) -> None:
        """A chunk of out = silu(X G^T) * (X U^T).

        Arguments: as of `multiply_chunk` without add, where the panels of G and U take turns in W, and a
        chunk has so many pairs of them.
        """
        rows, x, x_stride = load(arguments), load(arguments + 8), load(arguments + 16)
        w, w_stride, k = load(arguments + 24), load(arguments + 32), load(arguments + 40)
        n, size = load(arguments + 56), load(arguments + 64)
        out = matrix(load(arguments + 48), rows, n)
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
                    from_x, from_w, to = x + r * x_stride, w + 2 * p * w_stride, buffer.ctypes.data
                    put_tile(from_x, x_stride, from_w, w_stride, 2 * pairs, k, to, 4 * buffer.shape[1], take)
                    _put_gated(buffer, take, pairs, out, r, p * LANES)
                    r += take
                p += pairs

    return cast(Chunk, gated_chunk)


@njit(nogil=True, fastmath=FLAGS)
def _put_gated(buffer: Array, rows: int, pairs: int, out: Array, first: int, column: int) -> None:
    """out[first:, column:] = silu(gate) * up; in the buffer, 16 gates are followed by 16 ups."""
    for i in range(rows):
        for g in range(pairs):
            # As slices, since an index that might be negative keeps a loop from being vectorized.
            result = out[first + i, column + g * LANES : column + (g + 1) * LANES]
            gates = buffer[i, 2 * g * LANES : (2 * g + 1) * LANES]
            ups = buffer[i, (2 * g + 1) * LANES : (2 * g + 2) * LANES]
            for j in range(len(result)):
                result[j] = silu32(gates[j]) * ups[j]


multiply_chunk = _make_multiply(tile_fp32.put_tile, tile_fp32.add_tile)
gated_chunk = _make_gated(tile_fp32.put_tile)
multiply_int8_chunk = _make_multiply(tile_int8.put_tile, tile_int8.add_tile)
gated_int8_chunk = _make_gated(tile_int8.put_tile)
