"""The step before attention in one Triton kernel: norm and rotate q and k, write k and v into pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch import Launch, power_of_two


@triton.jit
def _rotary_kernel(
    qkv, k_pages, v_pages, positions, pages, page_slots, cos, sin, q_norm, k_norm, eps, qkv_stride,
    group: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    half: tl.constexpr, normed: tl.constexpr,
    lines: tl.constexpr, columns: tl.constexpr, rest_columns: tl.constexpr, value_columns: tl.constexpr,
):  # fmt: skip
    """Program (token, KV head): the query heads that share the KV head, its key and its value.

    A line of the matrices is a query head; the last line is the key. Columns are half of the rotated elements
    of a head, and the rest of it, which is not rotated.
    """
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
    turned_a = (a * x - b * y).to(qkv.dtype.element_ty)
    turned_b = (b * x + a * y).to(qkv.dtype.element_ty)

    place = tl.load(pages + token).to(tl.int64) * page_size + tl.load(page_slots + token)
    place = (place * kv_heads + kv_head) * head_dim
    target = tl.where(is_key[:, None], k_pages + place + d[None, :], left)
    tl.store(target, turned_a, mask=mask)
    tl.store(target + half, turned_b, mask=mask)
    straight_target = tl.where(is_key[:, None], k_pages + place + 2 * half + r[None, :], straight)
    tl.store(straight_target, c.to(qkv.dtype.element_ty), mask=rest_mask)
    v = tl.arange(0, value_columns)
    value = tl.load(source + (heads + kv_heads + kv_head) * head_dim + v, mask=v < head_dim)
    tl.store(v_pages + place + v, value, mask=v < head_dim)


def rotary_launch(
    qkv: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    page_slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
) -> Launch:
    """The launch that norms and rotates q and k in fp32, and writes k and v into their pages.

    qkv [tokens, (heads + 2 kv_heads) * head_dim], whose q is overwritten; k_pages, v_pages [pages, page_size,
    kv_heads, head_dim], contiguous; positions, pages, page_slots int32 [tokens]; cos, sin fp32 [context,
    half]; q_norm, k_norm fp32 [head_dim], or [0] for models without these norms. Padding tokens have
    page 0 and position 0.
    """
    _, page_size, kv_heads, head_dim = k_pages.shape
    group, half = qkv.shape[1] // (head_dim * kv_heads) - 2, cos.shape[1]
    return Launch(
        _rotary_kernel,
        (qkv.shape[0], kv_heads, 1),
        {
            "qkv": qkv, "k_pages": k_pages, "v_pages": v_pages, "positions": positions, "pages": pages,
            "page_slots": page_slots, "cos": cos, "sin": sin, "q_norm": q_norm, "k_norm": k_norm, "eps": eps,
            "qkv_stride": qkv.stride(0),
        },
        {
            "group": group, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size,
            "half": half, "normed": int(q_norm.shape[0] > 0), "lines": power_of_two(group + 1),
            "columns": power_of_two(half), "rest_columns": power_of_two(max(head_dim - 2 * half, 1)),
            "value_columns": power_of_two(head_dim),
        },
        warps=1,
        stages=1,
    )  # fmt: skip
