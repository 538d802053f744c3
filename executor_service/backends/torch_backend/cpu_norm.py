"""RMSNorm in fp32 on CPU."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.vector_math import FLAGS

Array = NDArray[np.float32]


@njit(nogil=True, cache=True, fastmath=FLAGS)
def rms_norm(x: Array, weight: Array, eps: np.float32, out: Array) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight for each row; x, out [rows, n], contiguous.

    On one thread: the whole of it is a hundredth of the product that follows.
    """
    rows, n = x.shape
    for r in range(rows):
        total = np.float32(0.0)
        for i in range(n):
            total += x[r, i] * x[r, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(n) + eps)
        for i in range(n):
            out[r, i] = x[r, i] * scale * weight[i]
