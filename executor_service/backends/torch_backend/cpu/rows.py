"""What is done row by row in fp32 on CPU: RMSNorm, and the bias that a product is added to."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.atomic import floats, load, matrix
from executor_service.backends.torch_backend.cpu.vector_math import FLAGS, float_of_bits

ROWS_AT_ONCE = 4
"""Rows of a chunk; fewer are not worth a second thread."""


@njit(nogil=True, fastmath=FLAGS)
def inverse_norm(x: NDArray[np.float32], eps: np.float32) -> np.float32:
    """1 / sqrt(mean(x^2) + eps)."""
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    inverse: np.float32 = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    return inverse


@njit(nogil=True)
def norm_chunk(arguments: int, chunk: int) -> None:
    """Some rows of out = x / sqrt(mean(x^2) + eps) * weight.

    Arguments: rows, x [rows, n], weight [n], out [rows, n], n, the bits of eps.
    """
    rows, n, eps = load(arguments), load(arguments + 32), float_of_bits(np.int32(load(arguments + 40)))
    x, out = matrix(load(arguments + 8), rows, n), matrix(load(arguments + 24), rows, n)
    weight = floats(load(arguments + 16), n)
    for r in range(chunk * ROWS_AT_ONCE, min((chunk + 1) * ROWS_AT_ONCE, rows)):
        scale = inverse_norm(x[r], eps)
        for i in range(n):
            out[r, i] = x[r, i] * weight[i] * scale


@njit(nogil=True)
def bias_chunk(arguments: int, chunk: int) -> None:
    """Some rows of out (+)= bias. Arguments: rows, bias [n], out [rows, n], n, add."""
    rows, n, add = load(arguments), load(arguments + 24), load(arguments + 32) != 0
    bias, out = floats(load(arguments + 8), n), matrix(load(arguments + 16), rows, n)
    for r in range(chunk * ROWS_AT_ONCE, min((chunk + 1) * ROWS_AT_ONCE, rows)):
        for i in range(n):
            out[r, i] = out[r, i] + bias[i] if add else bias[i]
