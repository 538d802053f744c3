"""Quantization of rows to the int16 that the tiles of `tile_int8.py` multiply."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]

from executor_service.backends.torch_backend.cpu.gemm.tile_int8 import ROW_SCALE_BYTES
from executor_service.backends.torch_backend.cpu.primitives.kernel import (
    Kernel,
    count_row_chunks,
    rows_of_chunk,
)
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, matrix, pointer
from executor_service.backends.torch_backend.cpu.primitives.records import Address, reader
from executor_service.backends.torch_backend.cpu.primitives.vector_math import float_of_bits

_INFINITY, _NO_SIGN = np.int32(0x7F800000), np.int32(0x7FFFFFFF)  # bits of fp32
_NEGLIGIBLE = np.float32(1e-30)  # a row of less is zero: the inverse of its scale would overflow


class QuantizeRows(NamedTuple):
    """X to int16, row by row: scale = max |x| / max_magnitude, and x / scale rounded, ties to even.

    A row with a NaN or an infinity gets the scale NaN, and so a result of NaN.
    """

    rows: int
    x: Address  # fp32 [rows, k]
    out: Address  # of each row a scale in fp32, then k int16, and a zero where k is odd
    out_stride: int  # bytes from row to row
    k: int
    max_magnitude: float  # of an int16


_read = reader(QuantizeRows)


@njit(nogil=True)
def _count_chunks(record: int) -> int:
    return count_row_chunks(_read(record).rows)


@njit(nogil=True)
def _compute_chunk(record: int, chunk: int) -> None:
    call = _read(record)
    k, largest = call.k, call.max_magnitude
    x, bits = matrix(call.x, call.rows, k), carray(pointer(call.x), (call.rows, k), np.int32)
    for r in rows_of_chunk(call.rows, chunk):
        to = call.out + r * call.out_stride
        scale = floats(to, 1)
        quantized = carray(pointer(to + ROW_SCALE_BYTES), (k + k % 2,), np.int16)
        # Magnitudes compare as their bits do, with NaN above all others: the maximum is one of integers.
        largest_bits = np.int32(0)
        for i in range(k):
            largest_bits = max(largest_bits, np.int32(bits[r, i] & _NO_SIGN))
        magnitude = float_of_bits(largest_bits)
        inverse = np.float32(0.0)
        if largest_bits >= _INFINITY:
            scale[0] = np.float32(np.nan)
        elif magnitude < _NEGLIGIBLE:
            scale[0] = np.float32(0.0)
        else:
            scale[0], inverse = magnitude / largest, largest / magnitude
        if largest_bits >= _INFINITY:
            quantized[:] = np.int16(0)
        else:
            for i in range(k):
                quantized[i] = np.int16(np.int32(np.rint(x[r, i] * inverse)))
        if k % 2:
            quantized[k] = np.int16(0)


QUANTIZE_ROWS = Kernel(QuantizeRows, _count_chunks, _compute_chunk)
