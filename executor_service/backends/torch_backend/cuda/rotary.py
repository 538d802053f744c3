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
    normed: tl.constexpr, lines: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Program (token, KV head): the query heads that share the KV head, its key and its value.

    A line of the matrices is a query head; the last line is the key. Columns are half a head.
    """
    token, kv_head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = head_dim // 2
    heads: tl.constexpr = group * kv_heads
    source = qkv + token.to(tl.int64) * qkv_stride
    line, d = tl.arange(0, lines), tl.arange(0, columns)
    is_key, in_half = line == group, d < half
    mask = (line <= group)[:, None] & in_half[None, :]
    head = tl.where(is_key, heads + kv_head, kv_head * group + line)
    left = source + head[:, None] * head_dim + d[None, :]
    a = tl.load(left, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(left + half, mask=mask, other=0.0).to(tl.float32)
    if normed:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / head_dim + eps)[:, None]
        q_left, k_left = tl.load(q_norm + d, mask=in_half), tl.load(k_norm + d, mask=in_half)
        q_right, k_right = tl.load(q_norm + half + d, mask=in_half), tl.load(k_norm + half + d, mask=in_half)
        a = a * scale * tl.where(is_key[:, None], k_left[None, :], q_left[None, :])
        b = b * scale * tl.where(is_key[:, None], k_right[None, :], q_right[None, :])
    angle = tl.load(positions + token) * half + d
    c, s = tl.load(cos + angle, mask=in_half)[None, :], tl.load(sin + angle, mask=in_half)[None, :]
    turned_a = (a * c - b * s).to(qkv.dtype.element_ty)
    turned_b = (b * c + a * s).to(qkv.dtype.element_ty)

    place = tl.load(pages + token).to(tl.int64) * page_size + tl.load(page_slots + token)
    place = (place * kv_heads + kv_head) * head_dim
    target = tl.where(is_key[:, None], k_pages + place + d[None, :], left)
    tl.store(target, turned_a, mask=mask)
    tl.store(target + half, turned_b, mask=mask)
    value = source + (heads + kv_heads + kv_head) * head_dim + d
    tl.store(v_pages + place + d, tl.load(value, mask=in_half), mask=in_half)
    tl.store(v_pages + place + half + d, tl.load(value + half, mask=in_half), mask=in_half)


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
    head_dim / 2]; q_norm, k_norm fp32 [head_dim], or [0] for models without these norms. Padding tokens have
    page 0 and position 0.
    """
    _, page_size, kv_heads, head_dim = k_pages.shape
    group = qkv.shape[1] // (head_dim * kv_heads) - 2
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
            "normed": int(q_norm.shape[0] > 0), "lines": power_of_two(group + 1),
            "columns": power_of_two(head_dim // 2),
        },
        warps=1,
        stages=1,
    )  # fmt: skip
