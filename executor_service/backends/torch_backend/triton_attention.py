"""Paged attention in Triton: decode, verify, chunk and prefill rows over K and V that lie in pages.

A program serves one query block (consecutive tokens of one row) and one KV head. Its matrix has a line for
each token and query head of the group, so that K and V are read once for all heads that share them. It
walks the keys in tiles with an online softmax (Milakov, Gimelshein 2018; FlashAttention-2, Dao 2023).

Two row classes differ in their tiles. Short rows (decode and verify) are bound by memory: their keys are
split into pieces of SPLIT_TOKENS, which run side by side and are then merged (Flash-Decoding, Dao et al.
2023). Long rows (chunks and prefill) are bound by arithmetic and have blocks enough: no split.

**A row's result depends neither on its neighbours, nor on the number of rows, nor on the block table's
width**: the tiles follow from the model and the row's class, pieces have a fixed size, not a fixed number,
and the order of every sum follows from positions alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.triton_launch import Launch, power_of_two
from executor_service.backends.torch_backend.triton_rows import AttentionRows

SPLIT_TOKENS = 512
MAX_HEAD_DIM = 128  # more does not fit into registers with these tiles
_LEAST = 16  # lines and columns of a matrix instruction
_SHORT_TILE_BYTES, _LONG_TILE_BYTES = 8192, 16384  # of K, and as much of V
_MERGE_SPLITS = 16  # read at once
_PROGRAMS = 1024  # fill a GPU of some 130 multiprocessors
_SERIAL_SPLITS = 8  # of one program at most, or one long row would be the last to end
_LOG2_E = 1.4426950408889634

_MASKED = tl.constexpr(-1e30)  # below every score, yet finite: -inf - -inf is not a number
# They change from step to step: a kernel that knew them would be compiled anew while requests wait.
_CHANGING = ("table_stride", "most_tokens", "most_splits")


@triton.jit
def _attend(
    q, k_pages, v_pages, table, positions, begin, end, score_scale, kv_head,
    kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    lines: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Keys begin..end of one row, seen by q [lines, columns] at `positions` [lines].

    Returns the sums of weighted values [lines, columns], the sums of weights and the highest scores [lines].
    """
    d = tl.arange(0, columns)
    in_head = d < head_dim
    highest = tl.full([lines], _MASKED, tl.float32)
    total = tl.zeros([lines], tl.float32)
    sums = tl.zeros([lines, columns], tl.float32)
    for first in range(begin, end, tile):
        key = first + tl.arange(0, tile)
        live = key < end  # behind it lie slots that were never written, and pages of others
        page = tl.load(table + key // page_size, mask=live, other=0).to(tl.int64)
        offset = ((page * page_size + key % page_size) * kv_heads + kv_head) * head_dim
        k_offset, v_offset = offset[None, :] + d[:, None], offset[:, None] + d[None, :]
        if columns == head_dim:
            k = tl.load(k_pages + k_offset, mask=live[None, :], other=0.0)
            v = tl.load(v_pages + v_offset, mask=live[:, None], other=0.0)
        else:
            k = tl.load(k_pages + k_offset, mask=live[None, :] & in_head[:, None], other=0.0)
            v = tl.load(v_pages + v_offset, mask=live[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * score_scale
        seen = live[None, :] & (key[None, :] <= positions[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        rescale = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * rescale + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * rescale[:, None], input_precision="ieee")
        highest = higher
    return sums, total, highest


@triton.jit(do_not_specialize=_CHANGING)
def _attention_kernel(
    out, partial_out, partial_lse, q, k_pages, v_pages, block_table, slots, q_starts, q_lens, kv_lens,
    block_rows, block_firsts, score_scale, q_stride, table_stride, most_tokens, most_splits,
    group: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    block_tokens: tl.constexpr, lines: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr,
    split_tokens: tl.constexpr,
):  # fmt: skip
    """Program (block, KV head, s): the pieces s, s + programs, ... of the block's keys; all if not split."""
    block, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(block_rows + block)
    if row < 0:
        return
    q_len, kv_len = tl.load(q_lens + row), tl.load(kv_lens + row)
    q_start, first = tl.load(q_starts + row), tl.load(block_firsts + block)
    end = tl.minimum(kv_len, kv_len - q_len + first + block_tokens)  # what the block's last token sees
    pieces = 1
    if split_tokens > 0:
        pieces = tl.maximum(tl.cdiv(end, split_tokens), 1)
    if tl.program_id(2) >= pieces:
        return
    table = block_table + tl.load(slots + row).to(tl.int64) * table_stride

    line, d = tl.arange(0, lines), tl.arange(0, columns)
    token = first + line // group
    head = kv_head * group + line % group
    real = (token < q_len) & (line < block_tokens * group)
    positions = kv_len - q_len + token
    mask = real[:, None] & (d < head_dim)[None, :]
    q_offset = (q_start + token) * q_stride + head * head_dim
    queries = tl.load(q + q_offset[:, None] + d[None, :], mask=mask, other=0.0)
    out_offset = (q_start + token) * (group * kv_heads * head_dim) + head * head_dim
    if split_tokens == 0:
        sums, total, _ = _attend(
            queries, k_pages, v_pages, table, positions, 0, end, score_scale, kv_head,
            kv_heads, head_dim, page_size, lines, columns, tile,
        )  # fmt: skip
        result = sums / tl.where(total > 0, total, 1.0)[:, None]  # a padding row has seen nothing: zeros
        tl.store(out + out_offset[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        partial = ((row * most_tokens + token).to(tl.int64) * (group * kv_heads) + head) * most_splits
        for piece in range(tl.program_id(2), pieces, tl.num_programs(2)):
            begin = piece * split_tokens
            sums, total, highest = _attend(
                queries, k_pages, v_pages, table, positions, begin, tl.minimum(end, begin + split_tokens),
                score_scale, kv_head, kv_heads, head_dim, page_size, lines, columns, tile,
            )  # fmt: skip
            total = tl.where(total > 0, total, 1.0)
            result = sums / total[:, None]
            # Tokens whose keys are one piece are done; the others, from the pieces they see, are merged.
            alone = (positions < split_tokens) & (piece == 0)
            tl.store(
                out + out_offset[:, None] + d[None, :], result.to(out.dtype.element_ty),
                mask=mask & alone[:, None],
            )  # fmt: skip
            shared = (positions >= split_tokens) & (positions >= begin)
            place = partial + piece
            tl.store(
                partial_out + place[:, None] * head_dim + d[None, :], result, mask=mask & shared[:, None]
            )
            tl.store(partial_lse + place, highest + tl.log2(total), mask=real & shared)


@triton.jit(do_not_specialize=_CHANGING[1:])
def _merge_kernel(
    out, partial_out, partial_lse, q_starts, q_lens, kv_lens, most_tokens, most_splits,
    group: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, columns: tl.constexpr,
    split_tokens: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Program (row x token, head): the mean of the token's pieces, each by its share of the weights."""
    row, token = tl.program_id(0) // most_tokens, tl.program_id(0) % most_tokens
    q_len = tl.load(q_lens + row)
    position = tl.load(kv_lens + row) - q_len + token
    if (token >= q_len) | (position < split_tokens):
        return
    head, heads = tl.program_id(1), group * kv_heads
    partial = ((row * most_tokens + token).to(tl.int64) * heads + head) * most_splits
    pieces = position // split_tokens + 1
    d = tl.arange(0, columns)
    highest, total, sums = _MASKED, 0.0, tl.zeros([columns], tl.float32)
    for first in range(0, pieces, at_once):
        piece = first + tl.arange(0, at_once)
        live = piece < pieces
        lse = tl.load(partial_lse + partial + piece, mask=live, other=float("-inf"))
        results = tl.load(
            partial_out + (partial + piece)[:, None] * head_dim + d[None, :],
            mask=live[:, None] & (d < head_dim)[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(lse, 0))
        rescale = tl.exp2(highest - higher)
        shares = tl.exp2(lse - higher)
        total = total * rescale + tl.sum(shares, 0)
        sums = sums * rescale + tl.sum(results * shares[:, None], 0)
        highest = higher
    place = ((tl.load(q_starts + row) + token) * heads + head) * head_dim
    tl.store(out + place + d, (sums / total).to(out.dtype.element_ty), mask=d < head_dim)


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    classes: Sequence[AttentionRows],
    *,
    split_tokens: int = SPLIT_TOKENS,
) -> torch.Tensor:
    """Causal attention of every row's tokens over the row's keys; out [tokens, heads * head_dim], dtype of q.

    q [tokens, heads, head_dim] bf16, fp16 or fp32: a view with any distance between tokens (of a multiple
    of 16 elements, for speed); k_pages, v_pages [pages, page_size, kv_heads, head_dim], contiguous, of q's
    dtype, the step's own K and V already in them; block_table int32 [slots, width]; `classes`: the rows,
    see `triton_rows.cut`. Scores are scaled by head_dim ** -0.5 and summed in fp32. A result is left
    undefined where a token belongs to no row. Raises ValueError.

    All arguments live on the device, nothing is read back, and every grid follows from shapes and the
    fields of `classes` that are Python numbers: a CUDA graph may capture this, once each kernel has
    been compiled by a call of the same shapes outside of it.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    if k_pages.shape[3] != head_dim or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is not that of the pages, or above {MAX_HEAD_DIM}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} KV heads evenly")
    if q.stride()[1:] != (head_dim, 1) or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("k_pages, v_pages and the heads of each token in q have to be contiguous")
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError("block_table has to be int32 with contiguous rows")
    out = torch.empty(tokens, heads * head_dim, dtype=q.dtype, device=q.device)
    for rows in classes:
        for launch in attention_launches(out, q, k_pages, v_pages, block_table, rows, split_tokens):
            launch.run()
    return out


def attention_launches(
    out: torch.Tensor,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    rows: AttentionRows,
    split_tokens: int = SPLIT_TOKENS,
) -> Iterator[Launch]:
    """What `paged_attention` launches, one after the other."""
    heads, head_dim = q.shape[1:]
    _, page_size, kv_heads, _ = k_pages.shape
    group = heads // kv_heads
    blocks = rows.block_rows.shape[0]
    lines = max(power_of_two(rows.block_tokens * group), _LEAST)
    columns = max(power_of_two(head_dim), _LEAST)
    tile = min(64, (_SHORT_TILE_BYTES if rows.short else _LONG_TILE_BYTES) // (columns * q.element_size()))
    splits = max(-(-block_table.shape[1] * page_size // split_tokens), 1) if rows.short else 1
    programs = min(splits, max(-(-_PROGRAMS // (blocks * kv_heads)), -(-splits // _SERIAL_SPLITS)))
    partial_out, partial_lse = out, out  # not touched
    if splits > 1:
        places = (rows.slots.shape[0] * rows.most_tokens, heads, splits)
        partial_out = torch.empty(*places, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(places, dtype=torch.float32, device=q.device)
    shape = {
        "group": group, "kv_heads": kv_heads, "head_dim": head_dim,
        "columns": columns, "split_tokens": split_tokens if rows.short else 0,
    }  # fmt: skip
    yield Launch(
        _attention_kernel,
        (blocks, kv_heads, programs),
        {
            "out": out, "partial_out": partial_out, "partial_lse": partial_lse, "q": q, "k_pages": k_pages,
            "v_pages": v_pages, "block_table": block_table, "slots": rows.slots, "q_starts": rows.q_starts,
            "q_lens": rows.q_lens, "kv_lens": rows.kv_lens, "block_rows": rows.block_rows,
            "block_firsts": rows.block_firsts, "score_scale": head_dim**-0.5 * _LOG2_E,
            "q_stride": q.stride(0), "table_stride": block_table.stride(0),
            "most_tokens": rows.most_tokens, "most_splits": splits,
        },
        shape
        | {"page_size": page_size, "block_tokens": rows.block_tokens, "lines": lines, "tile": tile},
        warps=4 if rows.short else 8,
        stages=5 if rows.short else 3,
    )  # fmt: skip
    if splits > 1:
        yield Launch(
            _merge_kernel,
            (rows.slots.shape[0] * rows.most_tokens, heads, 1),
            {
                "out": out, "partial_out": partial_out, "partial_lse": partial_lse, "q_starts": rows.q_starts,
                "q_lens": rows.q_lens, "kv_lens": rows.kv_lens, "most_tokens": rows.most_tokens,
                "most_splits": splits,
            },
            shape | {"at_once": _MERGE_SPLITS},
            warps=4,
            stages=1,
        )  # fmt: skip
