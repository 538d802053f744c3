"""What comes before attention: norm and rotation of queries and keys, and the write of K and V into pages."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.attention.pages import pages_of, put_key, put_value
from executor_service.backends.torch_backend.cpu.primitives.chunks import ROWS_AT_ONCE
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, ints, load, matrix
from executor_service.backends.torch_backend.cpu.primitives.vector_math import (
    FLAGS,
    float_of_bits,
    inverse_norm,
)

Array = NDArray[np.float32]


@njit(nogil=True)
def _norm_head(head: Array, norm: Array, eps: np.float32) -> None:
    """RMSNorm of one head's vector, in place, where `norm` is not empty."""
    if norm.shape[0]:
        scale = inverse_norm(head, eps)
        for d in range(head.shape[0]):
            head[d] = head[d] * scale * norm[d]


@njit(nogil=True, fastmath=FLAGS)
def _rotate_head(head: Array, cos: Array, sin: Array, norm: Array, eps: np.float32) -> None:
    """RMSNorm and rotation of one head's vector, in place."""
    _norm_head(head, norm, eps)
    half = cos.shape[0]
    for d in range(half):
        a, b = head[d], head[d + half]
        head[d] = a * cos[d] - b * sin[d]
        head[d + half] = b * cos[d] + a * sin[d]


@njit(nogil=True, fastmath=FLAGS)
def rotate_chunk(arguments: int, chunk: int) -> None:
    """Some tokens' q and k are rotated in place (after their norms, if any), k and v written into the cache.

    Arguments: tokens; the batch, see `attend_chunk`; K, V, the bytes of a value and page_size, see `Pages`;
    qkv [tokens, (heads + 2 kv_heads) * head_dim]; kv_heads, heads per KV head, head_dim; cos, sin [context,
    head_dim / 2]; context; the norms of q and k [size]; size: head_dim, or 0 where there are none; the bits
    of eps.
    """
    tokens, batch, pages = load(arguments), load(arguments + 8), pages_of(arguments)
    kv_heads, group, dim = pages.kv_heads, load(arguments + 64), pages.head_dim
    qkv = matrix(load(arguments + 48), tokens, (group + 2) * kv_heads * dim)
    context, size = load(arguments + 96), load(arguments + 120)
    cos = matrix(load(arguments + 80), context, dim // 2)
    sin = matrix(load(arguments + 88), context, dim // 2)
    q_norm, k_norm = floats(load(arguments + 104), size), floats(load(arguments + 112), size)
    eps = float_of_bits(np.int32(load(arguments + 128)))
    positions, page_of = ints(load(batch), tokens), ints(load(batch + 8), tokens)
    slots = ints(load(batch + 16), tokens)
    for t in range(chunk * ROWS_AT_ONCE, min((chunk + 1) * ROWS_AT_ONCE, tokens)):
        p = positions[t]
        for h in range(group * kv_heads):
            _rotate_head(qkv[t, h * dim : (h + 1) * dim], cos[p], sin[p], q_norm, eps)
        for h in range(kv_heads):
            first = (group * kv_heads + h) * dim
            key = qkv[t, first : first + dim]
            _rotate_head(key, cos[p], sin[p], k_norm, eps)
            put_key(pages, page_of[t], slots[t], h, key)
            first += kv_heads * dim
            put_value(pages, page_of[t], slots[t], h, qkv[t, first : first + dim])
