"""The call before attention: norms and rotates queries and keys, and writes K and V into pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.attention.pages import Pages, put_key, put_value
from executor_service.backends.torch_backend.cpu.primitives.kernel import (
    Kernel,
    count_row_chunks,
    rows_of_chunk,
)
from executor_service.backends.torch_backend.cpu.primitives.memory import floats, ints, matrix
from executor_service.backends.torch_backend.cpu.primitives.records import Address, reader
from executor_service.backends.torch_backend.cpu.primitives.vector_math import FLAGS, inverse_norm

Array = NDArray[np.float32]


class Places(NamedTuple):
    """The places of a batch's tokens: int32 [tokens] each."""

    positions: Address  # in the tokens' sequences
    pages: Address
    slots: Address  # in the pages


class RotateQkv(NamedTuple):
    """Norm, if any, and rotation of q and k in place; then k and v go to their pages. A row is a token."""

    rows: int
    places: Places
    pages: Pages
    qkv: Address  # fp32 [rows, (heads + 2 kv_heads) * head_dim]
    heads_per_kv_head: int
    cos: Address  # fp32 [context, half]
    sin: Address  # the same
    context: int
    half: int  # of the rotated elements, which come first in a head
    q_norm: Address  # fp32 [norm_size]
    k_norm: Address  # the same
    norm_size: int  # head_dim, or 0: no norms
    eps: float  # of the norms
    query_scales: Address  # fp32 [scaled]: of the rotated queries of each position
    scaled: int  # context, or 0: they are not scaled
    query_gains: Address  # fp32 [gained]: of the rotated queries' elements
    gained: int  # head_dim, or 0: they are 1


_read = reader(RotateQkv)


@njit(nogil=True, fastmath=FLAGS)
def _norm_head(head: Array, norm: Array, eps: np.float32) -> None:
    """RMSNorm of one head's vector, in place, where `norm` is not empty."""
    if norm.shape[0]:
        scale = inverse_norm(head, eps)
        for d in range(head.shape[0]):
            head[d] = head[d] * scale * norm[d]


@njit(nogil=True, fastmath=FLAGS)
def _rotate_head(head: Array, cos: Array, sin: Array, norm: Array, eps: np.float32) -> None:
    """RMSNorm of one head's vector and rotation of its first elements, in place."""
    _norm_head(head, norm, eps)
    half = cos.shape[0]
    for d in range(half):
        a, b = head[d], head[d + half]
        head[d] = a * cos[d] - b * sin[d]
        head[d + half] = b * cos[d] + a * sin[d]


@njit(nogil=True)
def _count_chunks(record: int) -> int:
    return count_row_chunks(_read(record).rows)


@njit(nogil=True, fastmath=FLAGS)
def _compute_chunk(record: int, chunk: int) -> None:
    call = _read(record)
    rows, pages, group, eps = call.rows, call.pages, call.heads_per_kv_head, np.float32(call.eps)
    kv_heads, dim = pages.kv_heads, pages.head_dim
    qkv = matrix(call.qkv, rows, (group + 2) * kv_heads * dim)
    cos, sin = matrix(call.cos, call.context, call.half), matrix(call.sin, call.context, call.half)
    q_norm, k_norm = floats(call.q_norm, call.norm_size), floats(call.k_norm, call.norm_size)
    query_scales = floats(call.query_scales, call.scaled)
    gains = floats(call.query_gains, call.gained)
    positions, page_of = ints(call.places.positions, rows), ints(call.places.pages, rows)
    slots = ints(call.places.slots, rows)
    for t in rows_of_chunk(rows, chunk):
        p = positions[t]
        for h in range(group * kv_heads):
            query = qkv[t, h * dim : (h + 1) * dim]
            _rotate_head(query, cos[p], sin[p], q_norm, eps)
            if call.scaled:
                for d in range(dim):
                    query[d] *= query_scales[p]
            for d in range(call.gained):
                query[d] *= gains[d]
        for h in range(kv_heads):
            first = (group * kv_heads + h) * dim
            key = qkv[t, first : first + dim]
            _rotate_head(key, cos[p], sin[p], k_norm, eps)
            put_key(pages, page_of[t], slots[t], h, key)
            first += kv_heads * dim
            put_value(pages, page_of[t], slots[t], h, qkv[t, first : first + dim])


ROTATE_QKV = Kernel(RotateQkv, _count_chunks, _compute_chunk)
