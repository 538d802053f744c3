"""The bias that a product is added to."""

from __future__ import annotations

from numba import njit

from executor_service.backends.torch_backend.cpu.primitives.chunks import ROWS_AT_ONCE
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, load, matrix


@njit(nogil=True)
def bias_chunk(arguments: int, chunk: int) -> None:
    """Some rows of out (+)= bias. Arguments: rows, bias [n], out [rows, n], n, add."""
    rows, n, add = load(arguments), load(arguments + 24), load(arguments + 32) != 0
    bias, out = floats(load(arguments + 8), n), matrix(load(arguments + 16), rows, n)
    for r in range(chunk * ROWS_AT_ONCE, min((chunk + 1) * ROWS_AT_ONCE, rows)):
        for i in range(n):
            out[r, i] = out[r, i] + bias[i] if add else bias[i]
