"""Biases: written, or added, before a product is added to them."""

from __future__ import annotations

from typing import NamedTuple

from numba import njit

from executor_service.backends.torch_backend.cpu.primitives.kernel import (
    Kernel,
    count_row_chunks,
    rows_of_chunk,
)
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, matrix
from executor_service.backends.torch_backend.cpu.primitives.records import Address, reader


class AddBias(NamedTuple):
    """out = bias, or out += bias with `add`."""

    rows: int
    bias: Address  # fp32 [n]
    out: Address  # fp32 [rows, n]
    n: int
    add: bool


_read = reader(AddBias)


@njit(nogil=True)
def _count_chunks(record: int) -> int:
    return count_row_chunks(_read(record).rows)


@njit(nogil=True)
def _compute_chunk(record: int, chunk: int) -> None:
    call = _read(record)
    bias, out = floats(call.bias, call.n), matrix(call.out, call.rows, call.n)
    for r in rows_of_chunk(call.rows, chunk):
        for i in range(call.n):
            out[r, i] = out[r, i] + bias[i] if call.add else bias[i]


ADD_BIAS = Kernel(AddBias, _count_chunks, _compute_chunk)
