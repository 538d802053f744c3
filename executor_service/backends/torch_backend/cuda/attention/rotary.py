"""The step before attention in one Triton kernel: norm and rotate q and k, write k and v into pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.attention.page_scales import (
    magnitude,
    rounded,
    scale_bits,
    scale_word,
)
from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch, power_of_two
from executor_service.backends.torch_backend.ops.kernels import AttentionWeights
from executor_service.backends.torch_backend.ops.page_format import LARGEST, LayerCache, scale_words


@triton.jit
def _chosen_line(x, chosen):
    """The line of x [lines, columns] where `chosen` is true, and zeros where it is true in no line."""
    return tl.sum(tl.where(chosen, x, 0.0), 0)


@triton.jit
def _rotary_kernel(
    qkv, k_pages, v_pages, scales, positions, pages, page_slots, cos, sin, q_norm, k_norm,
    query_scales, query_gains, eps, qkv_stride,
    group: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    half: tl.constexpr, normed: tl.constexpr, grown: tl.constexpr, gained: tl.constexpr,
    largest_number: tl.constexpr,
    lines: tl.constexpr, columns: tl.constexpr, rest_columns: tl.constexpr, value_columns: tl.constexpr,
):  # fmt: skip
    """Program (token, KV head): the query heads that share the KV head, its key and its value.

    A line of the matrices is a query head; the last line is the key. Columns are half of the rotated elements
    of a head, and the rest of it, which is not rotated. `largest_number` is that of the pages' format, if it
    has 8 bits and scales, else 0. `gained`, `grown`: rotated queries are multiplied by `query_gains`, by
    element, and by `query_scales`, by position.
    """
    begin_kernel()
    token, kv_head = tl.program_id(0), tl.program_id(1)
    rest: tl.constexpr = head_dim - 2 * half
    heads: tl.constexpr = group * kv_heads
    source = qkv + token.to(tl.int64) * qkv_stride
    line, d = tl.arange(0, lines), tl.arange(0, columns)
    is_key, in_half = line == group, d < half
    mask = (line <= group)[:, None] & in_half[None, :]
    head = tl.where(is_key, heads + kv_head, kv_head * group + line)
    left = source + head[:, None] * head_dim + d[None, :]
    a = tl.load(left, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(left + half, mask=mask, other=0.0).to(tl.float32)
    r = tl.arange(0, rest_columns)
    in_rest = r < rest
    rest_mask = (line <= group)[:, None] & in_rest[None, :]
    straight = source + head[:, None] * head_dim + 2 * half + r[None, :]
    c = tl.load(straight, mask=rest_mask, other=0.0).to(tl.float32)
    if normed:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        scale = tl.rsqrt(squares / head_dim + eps)[:, None]
        q_rest = tl.load(q_norm + 2 * half + r, mask=in_rest)
        k_rest = tl.load(k_norm + 2 * half + r, mask=in_rest)
        c = c * scale * tl.where(is_key[:, None], k_rest[None, :], q_rest[None, :])
        q_left, k_left = tl.load(q_norm + d, mask=in_half), tl.load(k_norm + d, mask=in_half)
        q_right, k_right = tl.load(q_norm + half + d, mask=in_half), tl.load(k_norm + half + d, mask=in_half)
        a = a * scale * tl.where(is_key[:, None], k_left[None, :], q_left[None, :])
        b = b * scale * tl.where(is_key[:, None], k_right[None, :], q_right[None, :])
    angle = tl.load(positions + token) * half + d
    x, y = tl.load(cos + angle, mask=in_half)[None, :], tl.load(sin + angle, mask=in_half)[None, :]
    a, b = a * x - b * y, b * x + a * y
    if gained:
        left_gain = tl.load(query_gains + d, mask=in_half)
        right_gain = tl.load(query_gains + half + d, mask=in_half)
        rest_gain = tl.load(query_gains + 2 * half + r, mask=in_rest)
        a *= tl.where(is_key[:, None], 1.0, left_gain[None, :])
        b *= tl.where(is_key[:, None], 1.0, right_gain[None, :])
        c *= tl.where(is_key[:, None], 1.0, rest_gain[None, :])
    if grown:
        growth = tl.where(is_key, 1.0, tl.load(query_scales + tl.load(positions + token)))[:, None]
        a, b, c = a * growth, b * growth, c * growth
    v = tl.arange(0, value_columns)
    in_head = v < head_dim
    value = tl.load(source + (heads + kv_heads + kv_head) * head_dim + v, mask=in_head, other=0.0)

    slot = tl.load(pages + token).to(tl.int64) * page_size + tl.load(page_slots + token)
    vector = slot * kv_heads + kv_head
    key_target, value_target = k_pages + vector * head_dim, v_pages + vector * head_dim + v
    if largest_number == 0:
        target = tl.where(is_key[:, None], key_target + d[None, :], left)
        tl.store(target, a.to(qkv.dtype.element_ty), mask=mask)
        tl.store(target + half, b.to(qkv.dtype.element_ty), mask=mask)
        straight_target = tl.where(is_key[:, None], key_target + 2 * half + r[None, :], straight)
        tl.store(straight_target, c.to(qkv.dtype.element_ty), mask=rest_mask)
        tl.store(value_target, value, mask=in_head)
    else:
        is_query = (line < group)[:, None]
        tl.store(left, a.to(qkv.dtype.element_ty), mask=mask & is_query)
        tl.store(left + half, b.to(qkv.dtype.element_ty), mask=mask & is_query)
        tl.store(straight, c.to(qkv.dtype.element_ty), mask=rest_mask & is_query)
        dtype: tl.constexpr = k_pages.dtype.element_ty
        key_a, key_b = _chosen_line(a, mask & is_key[:, None]), _chosen_line(b, mask & is_key[:, None])
        key_c = _chosen_line(c, rest_mask & is_key[:, None])
        largest = tl.maximum(tl.maximum(magnitude(key_a), magnitude(key_b)), magnitude(key_c))
        k_bits = scale_bits(largest, largest_number)
        tl.store(key_target + d, rounded(key_a, k_bits, dtype), mask=in_half)
        tl.store(key_target + half + d, rounded(key_b, k_bits, dtype), mask=in_half)
        tl.store(key_target + 2 * half + r, rounded(key_c, k_bits, dtype), mask=in_rest)
        wide = value.to(tl.float32)
        v_bits = scale_bits(magnitude(wide), largest_number)
        tl.store(value_target, rounded(wide, v_bits, dtype), mask=in_head)
        tl.store(scales + vector, scale_word(k_bits, v_bits))


def rotary_launch(
    qkv: torch.Tensor,
    cache: LayerCache,
    positions: torch.Tensor,
    pages: torch.Tensor,
    page_slots: torch.Tensor,
    w: AttentionWeights,
) -> Launch:
    """The launch that norms and rotates q and k in fp32, and writes k and v into their pages.

    qkv [tokens, (heads + 2 kv_heads) * head_dim], whose q is overwritten; `cache` as `plain_cache` makes it,
    in qkv's dtype or in 8 bits; positions, pages, page_slots int32 [tokens]. Padding tokens have page 0 and
    position 0.
    """
    _, page_size, kv_heads, head_dim = cache.k.shape
    group, half = qkv.shape[1] // (head_dim * kv_heads) - 2, w.cos.shape[1]
    return Launch(
        _rotary_kernel,
        (qkv.shape[0], kv_heads, 1),
        {
            "qkv": qkv, "k_pages": cache.k, "v_pages": cache.v, "scales": scale_words(cache),
            "positions": positions, "pages": pages, "page_slots": page_slots, "cos": w.cos, "sin": w.sin,
            "q_norm": w.q_norm, "k_norm": w.k_norm, "query_scales": w.query_scales,
            "query_gains": w.query_gains, "eps": w.eps, "qkv_stride": qkv.stride(0),
        },
        {
            "group": group, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size,
            "half": half, "normed": int(len(w.q_norm) > 0), "grown": int(len(w.query_scales) > 0),
            "gained": int(len(w.query_gains) > 0), "lines": power_of_two(group + 1),
            "columns": power_of_two(half), "rest_columns": power_of_two(max(head_dim - 2 * half, 1)),
            "value_columns": power_of_two(head_dim),
            "largest_number": int(LARGEST.get(cache.k.dtype, 0)),
        },
        warps=1,
        stages=1,
    )  # fmt: skip
