"""Paged attention in Triton: decode, verify, chunk and prefill rows over K and V in pages.

A program computes one query block (consecutive tokens of one row) for one KV head. Its matrix has a line for
each token and query head of the group, so that K and V are read once for all heads that share them. It goes
over the keys in tiles with an online softmax (Milakov, Gimelshein 2018; FlashAttention-2, Dao 2023).

There are two classes of rows. Short rows (decode and verify) are bound by memory: their keys are split into
pieces of SPLIT_TOKENS, which are computed side by side and then merged (Flash-Decoding, Dao et al. 2023).
Long rows (chunks and prefill) are bound by arithmetic and have enough blocks to fill the device: their keys
are not split.

**A row's result depends neither on the other rows, nor on their number, nor on the width of the block
table**: tiles follow from the model and the row's class, pieces have a fixed size and not a fixed number, and
the order of every sum follows from positions alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch import Arguments, Launch, power_of_two
from executor_service.backends.torch_backend.cuda.rows import SPLIT_TOKENS, AttentionRows, Tiling

MAX_HEAD_DIM = 128  # more would not fit into registers with these tiles
_MIN_SIDE = 16  # lines, and columns, of a matrix instruction
_SHORT_TILE_BYTES, _LONG_TILE_BYTES = 8192, 16384  # of K, and as much of V
_MERGE_PIECES = 16  # pieces whose results are read at once
_LOG2_E = 1.4426950408889634

_MASKED = tl.constexpr(-1e30)  # below every score, but finite: -inf - -inf would be NaN


@triton.jit
def _attend(
    q, k_pages, v_pages, table, positions, begin, end, score_scale, kv_head,
    kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    lines: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Attention of q [lines, columns] at `positions` [lines] over keys begin..end of one row.

    Returns the weighted sums of values [lines, columns], the sums of weights and the highest scores [lines].
    """
    d = tl.arange(0, columns)
    in_head = d < head_dim
    highest = tl.full([lines], _MASKED, tl.float32)
    total = tl.zeros([lines], tl.float32)
    sums = tl.zeros([lines, columns], tl.float32)
    for first in range(begin, end, tile):
        key = first + tl.arange(0, tile)
        live = key < end  # beyond it are unwritten slots, and other rows' pages
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


# partial_tokens changes from step to step: specialized for it, the kernel would be compiled during requests.
@triton.jit(do_not_specialize=("partial_tokens",))
def _attention_kernel(
    out, partial_out, partial_lse, q, k_pages, v_pages, tables, table_starts, q_starts, q_lens, kv_lens,
    item_rows, item_firsts, item_pieces, score_scale, q_stride, partial_tokens,
    group: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    block_tokens: tl.constexpr, lines: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr,
    split_tokens: tl.constexpr,
):  # fmt: skip
    """Program (item, KV head): a query block over one piece of its keys, or over all of them if not split.

    Programs start in order: all heads of an item, then the next item.
    """
    item, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    row = tl.load(item_rows + item)
    if row < 0:
        return
    q_len, kv_len = tl.load(q_lens + row), tl.load(kv_lens + row)
    q_start, first = tl.load(q_starts + row), tl.load(item_firsts + item)
    begin, end = 0, tl.minimum(kv_len, kv_len - q_len + first + block_tokens)  # seen by its last token
    if split_tokens > 0:
        begin = tl.load(item_pieces + item) * split_tokens
        end = tl.minimum(end, begin + split_tokens)

    line, d = tl.arange(0, lines), tl.arange(0, columns)
    token = first + line // group
    head = kv_head * group + line % group
    real = (token < q_len) & (line < block_tokens * group)
    positions = kv_len - q_len + token
    mask = real[:, None] & (d < head_dim)[None, :]
    # int64 only for the row's offset: offsets within a row fit into int32.
    q += q_start.to(tl.int64) * q_stride
    out += q_start.to(tl.int64) * (group * kv_heads * head_dim)
    q_offset = token * q_stride + head * head_dim
    queries = tl.load(q + q_offset[:, None] + d[None, :], mask=mask, other=0.0)
    sums, total, highest = _attend(
        queries, k_pages, v_pages, tables + tl.load(table_starts + row), positions, begin, end, score_scale,
        kv_head, kv_heads, head_dim, page_size, lines, columns, tile,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)  # a padding line, or a token before the piece
    result = sums / total[:, None]
    out_offset = token * (group * kv_heads * head_dim) + head * head_dim
    done = mask
    if split_tokens > 0:
        # A token whose keys are all in one piece is done. The others' results are stored to be merged.
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
    """Program (merge, head): the mean of the results of a token's pieces, by their sums of weights."""
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
    """Causal attention of every row's tokens over the row's keys; [tokens, heads * head_dim] in q's dtype.

    q [tokens, heads, head_dim] bf16, fp16 or fp32, a view with any stride between tokens (for speed a
    multiple of 16 elements); k_pages, v_pages [pages, page_size, kv_heads, head_dim], contiguous, in q's
    dtype, with the step's own K and V already in them. Scores are scaled by head_dim ** -0.5 and summed in
    fp32. The result of a token that belongs to no row is undefined. Raises ValueError.

    All arguments are on the device, nothing is read back, and every grid follows from shapes: a CUDA graph
    can capture this after a call outside of it has compiled each kernel.
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
    """The launches of `paged_attention`, in their order: short rows, their merge, long rows."""
    heads, head_dim = q.shape[1:]
    _, page_size, kv_heads, _ = k_pages.shape
    group = heads // kv_heads
    tiling = Tiling.of(group, q.dtype)
    columns = max(power_of_two(head_dim), _MIN_SIDE)
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
            "lines": max(power_of_two(block_tokens * group), _MIN_SIDE),
            "tile": min(64, tile_bytes // (columns * q.element_size())),
        }

    if items := rows.item_rows.shape[0]:
        merges = rows.merge_rows.shape[0]
        partial_tokens = min(rows.max_short_tokens, tiling.short)
        partial_out = partial_lse = q.new_empty(0, dtype=torch.float32)  # not accessed
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
