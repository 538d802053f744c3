"""Rows become integers: what `tile_int8` multiplies."""

from __future__ import annotations

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from executor_service.backends.torch_backend.cpu.gemm.tile_int8 import ROW_SCALE_BYTES
from executor_service.backends.torch_backend.cpu.primitives.chunks import ROWS_AT_ONCE
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, load, matrix, pointer
from executor_service.backends.torch_backend.cpu.primitives.vector_math import float_of_bits

_INFINITY, _NO_SIGN = np.int32(0x7F800000), np.int32(0x7FFFFFFF)  # bits of fp32
_NEGLIGIBLE = np.float32(1e-30)  # a row of less is zero: the inverse of its scale would overflow


@njit(nogil=True)
def quantize_chunk(arguments: int, chunk: int) -> None:
    """Some rows of X to int16: scale = max |x| / largest, and x / scale rounded, ties to even.

    A row with a NaN or an infinity gets the scale NaN, and so a result of NaN.
    Arguments: rows; X [rows, k]; where they go, each a scale in fp32 and k int16, one more where k is odd;
    the bytes from row to row; k; the largest activation.
    """
    rows, to, stride = load(arguments), load(arguments + 16), load(arguments + 24)
    k, largest = load(arguments + 32), np.float32(load(arguments + 40))
    x, bits = matrix(load(arguments + 8), rows, k), carray(pointer(load(arguments + 8)), (rows, k), np.int32)
    for r in range(chunk * ROWS_AT_ONCE, min((chunk + 1) * ROWS_AT_ONCE, rows)):
        scale = floats(to + r * stride, 1)
        quantized = carray(pointer(to + r * stride + ROW_SCALE_BYTES), (k + k % 2,), np.int16)
        # Without signs, floats are ordered as their bits are, NaN above all: a maximum of integers.
        most = np.int32(0)
        for i in range(k):
            most = max(most, np.int32(bits[r, i] & _NO_SIGN))
        magnitude = float_of_bits(most)
        inverse = np.float32(0.0)
        if most >= _INFINITY:
            scale[0] = np.float32(np.nan)
        elif magnitude < _NEGLIGIBLE:
            scale[0] = np.float32(0.0)
        else:
            scale[0], inverse = magnitude / largest, largest / magnitude
        if most >= _INFINITY:
            quantized[:] = np.int16(0)
        else:
            for i in range(k):
                quantized[i] = np.int16(np.int32(np.rint(x[r, i] * inverse)))
        if k % 2:
            quantized[k] = np.int16(0)
