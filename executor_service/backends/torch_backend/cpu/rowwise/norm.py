"""RMSNorm of rows in fp32."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from executor_service.backends.torch_backend.cpu.primitives.kernel import (
    Kernel,
    count_row_chunks,
    rows_of_chunk,
)
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, matrix
from executor_service.backends.torch_backend.cpu.primitives.records import Address, reader
from executor_service.backends.torch_backend.cpu.primitives.vector_math import inverse_norm


class NormRows(NamedTuple):
    """out = x / sqrt(mean(x^2) + eps) * weight, or out += that with `add`, row by row. out may be x."""

    rows: int
    x: Address  # fp32 [rows, n]
    x_stride: int  # numbers from row to row
    weight: Address  # fp32 [n]
    out: Address  # fp32 [rows, n]
    out_stride: int
    n: int
    eps: float
    add: bool


_read = reader(NormRows)


@njit(nogil=True)
def _count_chunks(record: int) -> int:
    return count_row_chunks(_read(record).rows)


@njit(nogil=True)
def _compute_chunk(record: int, chunk: int) -> None:
    call = _read(record)
    x = matrix(call.x, call.rows, call.x_stride)[:, : call.n]
    out = matrix(call.out, call.rows, call.out_stride)[:, : call.n]
    weight = floats(call.weight, call.n)
    for r in rows_of_chunk(call.rows, chunk):
        scale = inverse_norm(x[r], np.float32(call.eps))
        if call.add:
            for i in range(call.n):
                out[r, i] += x[r, i] * weight[i] * scale
        else:
            for i in range(call.n):
                out[r, i] = x[r, i] * weight[i] * scale


NORM_ROWS = Kernel(NormRows, _count_chunks, _compute_chunk)
