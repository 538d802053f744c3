"""Paged attention in Triton: decode, verify, chunk and prefill rows over K and V in pages.

The work is cut into items (see `layout/rows.py`). A program computes an item, a query block over a run of
pieces of its keys, for one KV head. Its matrix has a line for each token and query head of the group, so that
K and V are read once for all heads that share them. It goes over the keys in tiles with an online softmax
(Milakov, Gimelshein 2018; FlashAttention-2, Dao 2023). The results of a block's pieces are merged by the
program that has all of them, or else, where several work side by side, by the one that is done last
(Flash-Decoding, Dao et al. 2023).

**A row's result depends neither on the other rows, nor on their number, nor on the width of the block
table**: tiles follow from the model and the row's class, pieces have a fixed size and not a fixed number, and
the order of every sum follows from positions alone. Programs may end in any order: pieces are merged in
theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.attention.page_scales import scales_of_word
from executor_service.backends.torch_backend.cuda.attention.pipelines import (
    MIN_SIDE,
    AttentionDevice,
    attention_device,
)
from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Arguments, Launch, power_of_two
from executor_service.backends.torch_backend.cuda.layout.rows import ITEM_FIELDS, MAX_PART, AttentionRows
from executor_service.backends.torch_backend.ops.kernels import NONE
from executor_service.backends.torch_backend.ops.page_format import LayerCache, scale_words

MAX_HEAD_DIM = 256  # more would not fit into registers with these tiles
_LOG2_E = tl.constexpr(1.4426950408889634)
_MASKED = tl.constexpr(-1e30)  # below every score, but finite: -inf - -inf would be NaN


@triton.jit
def _attend(
    q, k_pages, v_pages, scales, table, positions, begin, end, score_scale, score_cap, kv_head,
    kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr, window: tl.constexpr,
    capped: tl.constexpr,
    lines: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, ahead: tl.constexpr,
):  # fmt: skip
    """Attention of q [lines, columns] at `positions` [lines] over keys begin..end of one row.

    Returns the weighted sums of values [lines, columns], the sums of weights and the highest scores [lines].
    Pages of 8 bits are multiplied as they are, converted to 16 bits or fp32, which have all their numbers:
    scores are then multiplied by the scales of the keys, and weights by those of the values. `ahead`: a
    tile's pages are looked up while the one before it is computed, so that K and V wait for no lookup.
    `capped`: scores s become score_cap * tanh(s ln(2) / 2).
    """
    scaled: tl.constexpr = k_pages.dtype.element_ty.primitive_bitwidth == 8
    # Weights times scales may be too small for fp16.
    value_dtype: tl.constexpr = tl.bfloat16 if scaled and q.dtype == tl.float16 else q.dtype
    d = tl.arange(0, columns)
    in_head = d < head_dim
    highest = tl.full([lines], _MASKED, tl.float32)
    total = tl.zeros([lines], tl.float32)
    sums = tl.zeros([lines, columns], tl.float32)
    page = tl.zeros([tile], tl.int32)
    if ahead:
        key = begin + tl.arange(0, tile)
        page = tl.load(table + key // page_size, mask=key < end, other=0)
    for first in range(begin, end, tile):
        key = first + tl.arange(0, tile)
        live = key < end  # beyond it are unwritten slots, and other rows' pages
        if not ahead:
            page = tl.load(table + key // page_size, mask=live, other=0)
        place = (page.to(tl.int64) * page_size + key % page_size) * kv_heads + kv_head
        if ahead:
            page = tl.load(table + (key + tile) // page_size, mask=key + tile < end, other=0)
        offset = place * head_dim
        k_offset, v_offset = offset[None, :] + d[:, None], offset[:, None] + d[None, :]
        if columns == head_dim:
            k = tl.load(k_pages + k_offset, mask=live[None, :], other=0.0)
            v = tl.load(v_pages + v_offset, mask=live[:, None], other=0.0)
        else:
            k = tl.load(k_pages + k_offset, mask=live[None, :] & in_head[:, None], other=0.0)
            v = tl.load(v_pages + v_offset, mask=live[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * score_scale
        if scaled:
            k_scale, v_scale = scales_of_word(tl.load(scales + place, mask=live, other=0))
            scores = scores * k_scale[None, :]
        if capped:
            scores = score_cap - 2.0 * score_cap / (tl.exp2(scores) + 1.0)
        seen = live[None, :] & (key[None, :] <= positions[:, None])
        if window:
            seen = seen & (key[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        rescale = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * rescale + tl.sum(weights, 1)
        if scaled:
            weights = weights * v_scale[None, :]
        sums = tl.dot(
            weights.to(value_dtype), v.to(value_dtype), sums * rescale[:, None], input_precision="ieee"
        )
        highest = higher
    return sums, total, highest


@triton.jit
def _beside_sinks(result, lse, sinks, real):
    """Results [lines, columns] where a sink has its part of the weights; it has no value.

    lse [lines]: base-2 logarithms of the sums of weights; sinks: addresses [lines] of scores.
    """
    sink = tl.load(sinks, mask=real, other=_MASKED) * _LOG2_E
    return result / (1.0 + tl.exp2(sink - lse))[:, None]


@triton.jit
def _merge(
    results, lses, sinks, mask, real, pieces, step,
    head_dim: tl.constexpr, sunk: tl.constexpr, lines: tl.constexpr, columns: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """The mean of the results [lines, columns] of a block's pieces, by their sums of weights.

    `step` lines are from one piece's results to the next one's. A piece that a line does not see changes
    nothing in it, to the last bit.
    """
    highest = tl.full([lines], _MASKED, tl.float32)
    total = tl.zeros([lines], tl.float32)
    sums = tl.zeros([lines, columns], tl.float32)
    wide_step = tl.full([], step, tl.int64)
    for piece in tl.range(0, pieces, num_stages=stages):
        offset = piece * wide_step
        lse = tl.load(lses + offset, mask=real, other=_MASKED)
        result = tl.load(results + offset * head_dim, mask=mask, other=0.0)
        higher = tl.maximum(highest, lse)
        rescale, share = tl.exp2(highest - higher), tl.exp2(lse - higher)
        total = total * rescale + share
        sums = sums * rescale[:, None] + result * share[:, None]
        highest = higher
    merged = sums / total[:, None]
    if sunk:
        merged = _beside_sinks(merged, highest + tl.log2(total), sinks, real)
    return merged


@triton.jit
def _piece(
    out, partial_out, partial_lse, q, k_pages, v_pages, scales, sinks, table, first_position, tokens, token,
    first_seen, mask, real, score_scale, score_cap, kv_head, piece, pieces, slot,
    kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr, window: tl.constexpr,
    capped: tl.constexpr, sunk: tl.constexpr,
    used: tl.constexpr, lines: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr,
    split_tokens: tl.constexpr, ahead: tl.constexpr,
):  # fmt: skip
    """One piece of a block: its results to `out` [lines, 1] if it is the only one, else to its slot."""
    line, d = tl.arange(0, lines), tl.arange(0, columns)
    begin = piece * split_tokens
    end = tl.minimum(first_position + tokens, begin + split_tokens)  # seen by the block's last token
    if window:
        # Tiles begin where they would without a window, so that their sums have the same order.
        begin += tl.maximum(first_seen - begin, 0) // tile * tile
    sums, total, highest = _attend(
        q, k_pages, v_pages, scales, table, first_position + token, begin, end, score_scale, score_cap,
        kv_head, kv_heads, head_dim, page_size, window, capped, lines, columns, tile, ahead,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)  # a padding line, or a token before the piece
    result = sums / total[:, None]
    if pieces == 1:
        if sunk:  # as where there are several, so that one more that a line does not see changes no bit
            result = _beside_sinks(result, highest + tl.log2(total), sinks, real)
        tl.store(out + d[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        place = (slot.to(tl.int64) * kv_heads + kv_head) * used + line
        tl.store(partial_out + place[:, None] * head_dim + d[None, :], result, mask=mask)
        tl.store(partial_lse + place, highest + tl.log2(total), mask=real)


# `part` differs between the launches of a step: specialized for it, the kernel would be compiled anew for 1.
@triton.jit(do_not_specialize=("part",))
def _attention_kernel(
    out, partial_out, partial_lse, arrivals, q, k_pages, v_pages, scales, sinks, tables, items, bounds, part,
    score_scale, score_cap, q_stride,
    group: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    window: tl.constexpr, capped: tl.constexpr, sunk: tl.constexpr,
    block_tokens: tl.constexpr, lines: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr,
    split_tokens: tl.constexpr, item_fields: tl.constexpr, runs: tl.constexpr, ahead: tl.constexpr,
    merge_columns: tl.constexpr, merge_stages: tl.constexpr,
):  # fmt: skip
    """Program p: of one part's pairs of (item, KV head), the p-th, and those that are whole grids further.

    All heads of an item come first, then the next item. Where a block has several items, the program that
    finishes the last of them merges the results of all their pieces.
    """
    begin_kernel()
    heads: tl.constexpr = group * kv_heads
    used: tl.constexpr = block_tokens * group  # lines
    line, d = tl.arange(0, lines), tl.arange(0, columns)
    first_item, end_item = tl.load(bounds + part), tl.load(bounds + part + 1)
    for work in range(tl.program_id(0), (end_item - first_item) * kv_heads, tl.num_programs(0)):
        kv_head = work % kv_heads
        item = items + (first_item + work // kv_heads) * item_fields
        first_token, tokens, first_position = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        table, first_of_run, run = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
        slot = tl.load(item + 6)
        first_piece, end_piece = 0, (first_position + tokens - 1) // split_tokens + 1
        first_seen = 0
        if window:
            first_seen = tl.maximum(first_position - window + 1, 0)  # by the block's first token
            first_piece = first_seen // split_tokens
        pieces = end_piece - first_piece
        begin_run, end_run = tl.maximum(first_of_run, first_piece), tl.minimum(first_of_run + run, end_piece)

        token = line // group
        head = kv_head * group + line % group
        real = (token < tokens) & (line < used)
        mask = real[:, None] & (d < head_dim)[None, :]
        # int64 only for the block's offset: offsets within a block fit into int32.
        source = q + first_token.to(tl.int64) * q_stride
        queries = tl.load(
            source + (token * q_stride + head * head_dim)[:, None] + d[None, :], mask=mask, other=0.0
        )
        lines_out = out + first_token.to(tl.int64) * (heads * head_dim)
        lines_out += (token * (heads * head_dim) + head * head_dim)[:, None]
        if runs:
            for piece in range(begin_run, end_run):
                _piece(
                    lines_out, partial_out, partial_lse, queries, k_pages, v_pages, scales, sinks + head,
                    tables + table, first_position, tokens, token, first_seen, mask, real, score_scale,
                    score_cap, kv_head, piece, pieces, slot + piece - first_of_run, kv_heads, head_dim,
                    page_size, window, capped, sunk, used, lines, columns, tile, split_tokens, ahead,
                )  # fmt: skip
        else:
            _piece(
                lines_out, partial_out, partial_lse, queries, k_pages, v_pages, scales, sinks + head,
                tables + table, first_position, tokens, token, first_seen, mask, real, score_scale,
                score_cap, kv_head, first_of_run, pieces, slot, kv_heads, head_dim, page_size, window, capped,
                sunk, used, lines, columns, tile, split_tokens, ahead,
            )  # fmt: skip
        # An item without tokens is one of pieces that its block does not see.
        if (pieces > 1) & (tokens > 0):
            first_slot, mine = slot - (first_of_run - first_piece), end_run - begin_run
            arrived = arrivals + first_slot * kv_heads + kv_head
            tl.debug_barrier()  # all threads have stored before one of them counts the pieces as arrived
            before = pieces - mine
            if mine < pieces:
                before = tl.atomic_add(arrived, mine, sem="acq_rel", scope="gpu")
            if before == pieces - mine:
                place = (first_slot.to(tl.int64) * kv_heads + kv_head) * used + line
                # All columns of long rows' blocks at once do not fit into registers.
                for first in tl.static_range(0, columns, merge_columns):
                    column = first + tl.arange(0, merge_columns)
                    inside = real[:, None] & (column < head_dim)[None, :]
                    merged = _merge(
                        partial_out + place[:, None] * head_dim + column[None, :], partial_lse + place,
                        sinks + head, inside, real, pieces, kv_heads * used, head_dim, sunk, lines,
                        merge_columns, merge_stages,
                    )  # fmt: skip
                    tl.store(lines_out + column[None, :], merged.to(out.dtype.element_ty), mask=inside)
                if mine < pieces:
                    tl.store(arrived, 0)  # for the next launch


def paged_attention(
    q: torch.Tensor,
    cache: LayerCache,
    rows: AttentionRows,
    arrivals: torch.Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor = NONE,
) -> torch.Tensor:
    """Causal attention of every row's tokens over the row's keys; [tokens, heads * head_dim] in q's dtype.

    q [tokens, heads, head_dim] bf16, fp16 or fp32, a view with any stride between tokens (for speed a
    multiple of 16 elements); `cache` as `plain_cache` makes it, in q's dtype or in 8 bits, with the step's
    own K and V already in it. Scores are multiplied by `scale` and summed in fp32; `cap` and `sinks`: see
    `AttentionWeights`. The result of a token that belongs to no row is undefined. `arrivals`: of
    `new_arrivals`. Raises ValueError.

    All arguments are on the device, nothing is read back, and every grid follows from shapes: a CUDA graph
    can capture this after a call outside of it has compiled each kernel.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = cache.k.shape[2]
    if cache.k.shape[3] != head_dim or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is not that of the pages, or above {MAX_HEAD_DIM}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} KV heads evenly")
    if q.stride()[1:] != (head_dim, 1) or not (cache.k.is_contiguous() and cache.v.is_contiguous()):
        raise ValueError("K, V and the heads of each token in q have to be contiguous")
    out = torch.empty(tokens, heads * head_dim, dtype=q.dtype, device=q.device)
    device = attention_device(q.device)
    for launch in attention_launches(out, q, cache, rows, arrivals, scale, device, cap, sinks):
        launch.run()
    return out


def new_arrivals(kv_heads: int, device: torch.device) -> torch.Tensor:
    """How many pieces of each block and KV head are done: int32, zero before and after each launch.

    Launches of one stream can share it, as nothing else of them overlaps.
    """
    return torch.zeros(MAX_PART * kv_heads, dtype=torch.int32, device=device)


def attention_launches(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: LayerCache,
    rows: AttentionRows,
    arrivals: torch.Tensor,
    scale: float,
    device: AttentionDevice,
    cap: float = 0.0,
    sinks: torch.Tensor = NONE,
) -> Iterator[Launch]:
    """The launches of `paged_attention`, in their order: short rows, long rows, a part at a time."""
    heads, head_dim = q.shape[1:]
    _, page_size, kv_heads, _ = cache.k.shape
    group, columns = heads // kv_heads, max(power_of_two(head_dim), MIN_SIDE)
    inputs: Arguments = {
        "out": out, "q": q, "k_pages": cache.k, "v_pages": cache.v, "scales": scale_words(cache),
        "sinks": sinks if len(sinks) else arrivals, "tables": rows.tables, "arrivals": arrivals,
        "score_scale": scale * _LOG2_E.value * (2 / cap if cap else 1), "score_cap": cap * _LOG2_E.value,
        "q_stride": q.stride(0),
    }  # fmt: skip
    pipelines, converted = device.pipelines, cache.k.dtype != q.dtype
    for work, pipeline in ((rows.short, pipelines.short), (rows.long, pipelines.long)):
        slots = work.slots
        if not slots:
            continue
        how = pipeline.of_heads(
            columns, q.element_size(), plain=not (rows.window or converted), converted=converted
        )
        used, programs = work.cut.block * group, slots * kv_heads
        partial_out = torch.empty(slots, kv_heads, used, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(slots, kv_heads, used, dtype=torch.float32, device=q.device)
        for part in range(len(work.bounds) - 1):
            launch = Launch(
                _attention_kernel,
                (programs, 1, 1),
                inputs
                | {
                    "partial_out": partial_out, "partial_lse": partial_lse, "items": work.items,
                    "bounds": work.bounds, "part": part,
                },
                {
                    "group": group, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size,
                    "window": rows.window, "capped": int(cap > 0), "sunk": int(len(sinks) > 0),
                    "block_tokens": work.cut.block, "lines": max(power_of_two(used), MIN_SIDE),
                    "columns": columns, "tile": how.tile(columns, q.element_size()),
                    "split_tokens": work.cut.split, "item_fields": ITEM_FIELDS,
                    "runs": work.cut.in_runs, "ahead": how.ahead,
                    "merge_columns": min(columns, how.merge_columns), "merge_stages": how.merge_stages,
                },
                warps=how.warps,
                stages=how.stages,
                registers=how.registers,
            )  # fmt: skip
            if rows.processors:
                programs = min(programs, rows.processors * device.resident(launch))
            yield replace(launch, grid=(programs, 1, 1))
