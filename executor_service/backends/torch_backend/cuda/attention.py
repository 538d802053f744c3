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

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch import Arguments, Launch, power_of_two
from executor_service.backends.torch_backend.cuda.rows import SPLIT_TOKENS, AttentionRows, Tiling

MAX_HEAD_DIM = 128  # more does not fit into registers with these tiles
_LEAST = 16  # lines and columns of a matrix instruction
_SHORT_TILE_BYTES, _LONG_TILE_BYTES = 8192, 16384  # of K, and as much of V
_MERGE_PIECES = 16  # read at once
_LOG2_E = 1.4426950408889634

_MASKED = tl.constexpr(-1e30)  # below every score, yet finite: -inf - -inf is not a number


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


# Its last size changes from step to step: a kernel that knew it would be compiled anew while requests wait.
@triton.jit(do_not_specialize=("partial_tokens",))
def _attention_kernel(
    out, partial_out, partial_lse, q, k_pages, v_pages, tables, table_starts, q_starts, q_lens, kv_lens,
    item_rows, item_firsts, item_pieces, score_scale, q_stride, partial_tokens,
    group: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    block_tokens: tl.constexpr, lines: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr,
    split_tokens: tl.constexpr,
):  # fmt: skip
    """Program (item, KV head): one piece of a block's keys, or all of them where they are not split.

    Programs start in order: all heads of an item, then the next item.
    """
    item, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    row = tl.load(item_rows + item)
    if row < 0:
        return
    q_len, kv_len = tl.load(q_lens + row), tl.load(kv_lens + row)
    q_start, first = tl.load(q_starts + row), tl.load(item_firsts + item)
    begin, end = 0, tl.minimum(kv_len, kv_len - q_len + first + block_tokens)  # what its last token sees
    if split_tokens > 0:
        begin = tl.load(item_pieces + item) * split_tokens
        end = tl.minimum(end, begin + split_tokens)

    line, d = tl.arange(0, lines), tl.arange(0, columns)
    token = first + line // group
    head = kv_head * group + line % group
    real = (token < q_len) & (line < block_tokens * group)
    positions = kv_len - q_len + token
    mask = real[:, None] & (d < head_dim)[None, :]
    # Wide where the row begins: inside of it no number is large.
    q += q_start.to(tl.int64) * q_stride
    out += q_start.to(tl.int64) * (group * kv_heads * head_dim)
    q_offset = token * q_stride + head * head_dim
    queries = tl.load(q + q_offset[:, None] + d[None, :], mask=mask, other=0.0)
    sums, total, highest = _attend(
        queries, k_pages, v_pages, tables + tl.load(table_starts + row), positions, begin, end, score_scale,
        kv_head, kv_heads, head_dim, page_size, lines, columns, tile,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)  # a line that is no token's, or comes before the piece
    result = sums / total[:, None]
    out_offset = token * (group * kv_heads * head_dim) + head * head_dim
    done = mask
    if split_tokens > 0:
        # Tokens whose keys are one piece are done; the others, from the pieces they see, are merged.
        done = mask & ((positions < split_tokens) & (begin == 0))[:, None]
        shared = (positions >= split_tokens) & (positions >= begin)
        place = (item.to(tl.int64) * (group * kv_heads) + head) * partial_tokens + line // group
        tl.store(partial_out + place[:, None] * head_dim + d[None, :], result, mask=mask & shared[:, None])
        tl.store(partial_lse + place, highest + tl.log2(total), mask=real & shared)
    tl.store(out + out_offset[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=done)


@triton.jit(do_not_specialize=("partial_tokens",))
def _merge_kernel(
    out, partial_out, partial_lse, q_starts, q_lens, kv_lens, item_firsts,
    merge_rows, merge_tokens, merge_items, partial_tokens,
    group: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, columns: tl.constexpr,
    split_tokens: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Program (merge, head): the mean of a token's pieces, each by its share of the weights."""
    row = tl.load(merge_rows + tl.program_id(0))
    if row < 0:
        return
    token, item = tl.load(merge_tokens + tl.program_id(0)), tl.load(merge_items + tl.program_id(0))
    head, heads = tl.program_id(1), group * kv_heads
    position = tl.load(kv_lens + row) - tl.load(q_lens + row) + token
    pieces = position // split_tokens + 1
    step = heads * partial_tokens  # from one item to the next
    partial = (item.to(tl.int64) * heads + head) * partial_tokens + token - tl.load(item_firsts + item)
    d = tl.arange(0, columns)
    highest, total, sums = _MASKED, 0.0, tl.zeros([columns], tl.float32)
    for first in range(0, pieces, at_once):
        piece = first + tl.arange(0, at_once)
        live = piece < pieces
        place = partial + piece.to(tl.int64) * step
        lse = tl.load(partial_lse + place, mask=live, other=float("-inf"))
        results = tl.load(
            partial_out + place[:, None] * head_dim + d[None, :],
            mask=live[:, None] & (d < head_dim)[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(lse, 0))
        rescale = tl.exp2(highest - higher)
        shares = tl.exp2(lse - higher)
        total = total * rescale + tl.sum(shares, 0)
        sums = sums * rescale + tl.sum(results * shares[:, None], 0)
        highest = higher
    place = ((tl.load(q_starts + row) + token).to(tl.int64) * heads + head) * head_dim
    tl.store(out + place + d, (sums / total).to(out.dtype.element_ty), mask=d < head_dim)


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rows: AttentionRows,
    *,
    split_tokens: int = SPLIT_TOKENS,
) -> torch.Tensor:
    """Causal attention of every row's tokens over the row's keys; out [tokens, heads * head_dim], dtype of q.

    q [tokens, heads, head_dim] bf16, fp16 or fp32: a view with any distance between tokens (of a multiple
    of 16 elements, for speed); k_pages, v_pages [pages, page_size, kv_heads, head_dim], contiguous, of q's
    dtype, the step's own K and V already in them. Scores are scaled by head_dim ** -0.5 and summed in fp32.
    A result is left undefined where a token belongs to no row. Raises ValueError.

    All arguments live on the device, nothing is read back, and every grid follows from shapes: a CUDA graph
    may capture this, once each kernel has been compiled by a call outside of it.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    if k_pages.shape[3] != head_dim or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is not that of the pages, or above {MAX_HEAD_DIM}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} KV heads evenly")
    if q.stride()[1:] != (head_dim, 1) or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("k_pages, v_pages and the heads of each token in q have to be contiguous")
    out = torch.empty(tokens, heads * head_dim, dtype=q.dtype, device=q.device)
    for launch in attention_launches(out, q, k_pages, v_pages, rows, split_tokens):
        launch.run()
    return out


def attention_launches(
    out: torch.Tensor,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    rows: AttentionRows,
    split_tokens: int = SPLIT_TOKENS,
) -> Iterator[Launch]:
    """What `paged_attention` launches, one after the other: short rows, their merge, long rows."""
    heads, head_dim = q.shape[1:]
    _, page_size, kv_heads, _ = k_pages.shape
    group = heads // kv_heads
    tiling = Tiling.of(group, q.dtype)
    columns = max(power_of_two(head_dim), _LEAST)
    shape = {"group": group, "kv_heads": kv_heads, "head_dim": head_dim, "columns": columns}
    common: Arguments = {"q_starts": rows.q_starts, "q_lens": rows.q_lens, "kv_lens": rows.kv_lens}
    inputs = common | {
        "out": out, "q": q, "k_pages": k_pages, "v_pages": v_pages, "tables": rows.tables,
        "table_starts": rows.table_starts, "score_scale": head_dim**-0.5 * _LOG2_E, "q_stride": q.stride(0),
    }  # fmt: skip

    def tiles(block_tokens: int, tile_bytes: int) -> dict[str, int]:
        return shape | {
            "page_size": page_size,
            "block_tokens": block_tokens,
            "lines": max(power_of_two(block_tokens * group), _LEAST),
            "tile": min(64, tile_bytes // (columns * q.element_size())),
        }

    if items := rows.item_rows.shape[0]:
        merges = rows.merge_rows.shape[0]
        partial_tokens = min(rows.most_tokens, tiling.short)
        partial_out = partial_lse = q.new_empty(0, dtype=torch.float32)  # not touched
        if merges:
            places = (items, heads, partial_tokens)
            partial_out = torch.empty(*places, head_dim, dtype=torch.float32, device=q.device)
            partial_lse = torch.empty(places, dtype=torch.float32, device=q.device)
        partial: Arguments = {
            "partial_out": partial_out,
            "partial_lse": partial_lse,
            "partial_tokens": partial_tokens,
        }
        work: Arguments = {
            "item_rows": rows.item_rows,
            "item_firsts": rows.item_firsts,
            "item_pieces": rows.item_pieces,
        }
        yield Launch(
            _attention_kernel,
            (items * kv_heads, 1, 1),
            inputs | partial | work,
            tiles(tiling.short, _SHORT_TILE_BYTES) | {"split_tokens": split_tokens},
            warps=4,
            stages=5,
        )
        if merges:
            which: Arguments = {
                name: getattr(rows, name) for name in ("merge_rows", "merge_tokens", "merge_items")
            }
            yield Launch(
                _merge_kernel,
                (merges, heads, 1),
                common | partial | which | {"out": out, "item_firsts": rows.item_firsts},
                shape | {"split_tokens": split_tokens, "at_once": _MERGE_PIECES},
                warps=4,
                stages=1,
            )
    if blocks := rows.long_rows.shape[0]:
        none = q.new_empty(0, dtype=torch.float32)
        work = {"item_rows": rows.long_rows, "item_firsts": rows.long_firsts, "item_pieces": rows.long_firsts}
        yield Launch(
            _attention_kernel,
            (blocks * kv_heads, 1, 1),
            inputs | {"partial_out": none, "partial_lse": none, "partial_tokens": 0} | work,
            tiles(tiling.long, _LONG_TILE_BYTES) | {"split_tokens": 0},
            warps=8,
            stages=3,
        )
