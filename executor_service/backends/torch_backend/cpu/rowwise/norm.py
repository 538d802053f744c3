"""RMSNorm of rows in fp32."""

from __future__ import annotations

import numpy as np
from numba import njit

from executor_service.backends.torch_backend.cpu.primitives.chunks import ROWS_AT_ONCE
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, load, matrix
from executor_service.backends.torch_backend.cpu.primitives.vector_math import float_of_bits, inverse_norm


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
