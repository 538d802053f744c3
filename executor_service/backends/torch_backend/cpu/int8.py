"""Linear layers with int8 weights on CPU: rows are quantized as they come, `tile_int8` adds up products.

A row of X becomes int16 with one scale, a row of W lies as int8 with one scale; what is between is exact.
Arguments of all chunks: rows; X [rows, k]; room for it quantized: scales fp32 [rows], then int16 [rows, k,
one more where k is odd]; k; the largest activation. Of products also: W packed; its scales fp32
[panels * 16]; out [rows, n]; n; columns of out in a chunk / 16; the kind: out = X W^T (PUT), out += X W^T
(ADD), or out = silu(X G^T) * (X U^T) (GATED), where in W the panels of G and U take turns.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.atomic import floats, load, matrix, pointer
from executor_service.backends.torch_backend.cpu.registers import LANES, MOST_ROWS, tile_panels, tile_rows
from executor_service.backends.torch_backend.cpu.rows import ROWS_AT_ONCE
from executor_service.backends.torch_backend.cpu.tile_int8 import PANEL_ROW_BYTES, put_sums
from executor_service.backends.torch_backend.cpu.vector_math import FLAGS, float_of_bits, silu32

Array = NDArray[np.float32]

PUT, ADD, GATED = 0, 1, 2

_TOGETHER = 4  # panels that share a pass over the rows, at most
_BLOCK_ROWS = 96  # of X, that stay in the second-level cache while a chunk of W passes by
_INFINITY, _NO_SIGN = np.int32(0x7F800000), np.int32(0x7FFFFFFF)  # bits of fp32
_NEGLIGIBLE = np.float32(1e-30)  # a row of less is zero: the inverse of its scale would overflow


@njit(nogil=True)
def quantize_chunk(arguments: int, chunk: int) -> None:
    """Some rows of X to integers: scale = max |x| / largest, and x / scale rounded, ties to even.

    A row with a NaN or an infinity gets the scale NaN, and so a result of NaN.
    """
    rows, k, largest = load(arguments), load(arguments + 24), np.float32(load(arguments + 32))
    x, bits = matrix(load(arguments + 8), rows, k), carray(pointer(load(arguments + 8)), (rows, k), np.int32)
    scales, width = floats(load(arguments + 16), rows), k + k % 2
    quantized = carray(pointer(load(arguments + 16) + 4 * rows), (rows, width), np.int16)
    for r in range(chunk * ROWS_AT_ONCE, min((chunk + 1) * ROWS_AT_ONCE, rows)):
        # Without signs, floats are ordered as their bits are, NaN above all: a maximum of integers.
        most = np.int32(0)
        for i in range(k):
            most = max(most, np.int32(bits[r, i] & _NO_SIGN))
        magnitude = float_of_bits(most)
        inverse = np.float32(0.0)
        if most >= _INFINITY:
            scales[r] = np.float32(np.nan)
        elif magnitude < _NEGLIGIBLE:
            scales[r] = np.float32(0.0)
        else:
            scales[r], inverse = magnitude / largest, largest / magnitude
        if most >= _INFINITY:
            quantized[r, :] = np.int16(0)
        else:
            for i in range(k):
                quantized[r, i] = np.int16(np.int32(np.rint(x[r, i] * inverse)))
        if k % 2:
            quantized[r, k] = np.int16(0)


@njit(nogil=True)
def int8_product_chunk(arguments: int, chunk: int) -> None:
    """Some columns of the product, for all rows, a block of rows after the other."""
    rows, k, n = load(arguments), load(arguments + 24), load(arguments + 64)
    size, kind, pairs = load(arguments + 72), load(arguments + 80), (k + 1) // 2
    each = 2 if kind == GATED else 1  # panels for 16 columns of out
    low, high = chunk * size * each, min((chunk + 1) * size, (n + LANES - 1) // LANES) * each
    x, x_stride, x_scales = load(arguments + 16) + 4 * rows, 4 * pairs, floats(load(arguments + 16), rows)
    w, w_scales = load(arguments + 40), floats(load(arguments + 48), high * LANES)
    out = matrix(load(arguments + 56), rows, n)
    panel_bytes = pairs * PANEL_ROW_BYTES
    sums = np.empty((MOST_ROWS, _TOGETHER * LANES), np.int32)
    for block in range(0, rows, _BLOCK_ROWS):
        last = min(block + _BLOCK_ROWS, rows)
        p = low
        while p < high:
            together = min(max(tile_panels(last - block), 2), high - p)
            scales = w_scales[p * LANES : (p + together) * LANES]
            r = block
            while r < last:
                take = tile_rows(last - r)
                from_x, from_w = x + r * x_stride, w + p * panel_bytes
                to, to_stride = sums.ctypes.data, 4 * sums.shape[1]
                put_sums(from_x, x_stride, from_w, panel_bytes, together, pairs, to, to_stride, take)
                for i in range(take):
                    if kind == GATED:
                        _put_gated(sums[i], x_scales[r + i], scales, out[r + i, p // 2 * LANES :])
                    else:
                        _put(sums[i], x_scales[r + i], scales, out[r + i, p * LANES :], kind == ADD)
                r += take
            p += together


@njit(nogil=True)
def _put(sums: NDArray[np.int32], x_scale: np.float32, w_scales: Array, out: Array, add: bool) -> None:
    """out (+)= the sums in their scale, as far as both go."""
    for j in range(min(len(w_scales), len(out))):
        value = np.float32(sums[j]) * (x_scale * w_scales[j])
        out[j] = out[j] + value if add else value


@njit(nogil=True, fastmath=FLAGS)
def _put_gated(sums: NDArray[np.int32], x_scale: np.float32, w_scales: Array, out: Array) -> None:
    """out = silu(gate) * up; 16 sums of the one are followed by 16 of the other."""
    for p in range(len(w_scales) // (2 * LANES)):
        gates, ups = 2 * p * LANES, (2 * p + 1) * LANES
        for j in range(min(LANES, len(out) - p * LANES)):
            gate = np.float32(sums[gates + j]) * (x_scale * w_scales[gates + j])
            up = np.float32(sums[ups + j]) * (x_scale * w_scales[ups + j])
            out[p * LANES + j] = silu32(gate) * up
