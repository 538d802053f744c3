"""`CpuRecordedBlocks`: all blocks of a model as one table of calls, so that Python makes one call per step.

Between two calls Python takes about 10 us, and more if its code is not in the caches or other threads wait
for the interpreter. With 8 calls per block that was a third of a step of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from executor_service.backends.torch_backend.cpu.attention.attend import AttendPages, Items
from executor_service.backends.torch_backend.cpu.attention.batch import PreparedBatch
from executor_service.backends.torch_backend.cpu.attention.pages import Pages
from executor_service.backends.torch_backend.cpu.attention.rotate import Places, RotateQkv
from executor_service.backends.torch_backend.cpu.layers.step_changes import (
    CpuLowRank,
    CpuStepChanges,
    recorded_changes,
)
from executor_service.backends.torch_backend.cpu.layers.threaded_linear import (
    NO_GROUPS,
    RowChanges,
    ThreadedGated,
    ThreadedLinear,
)
from executor_service.backends.torch_backend.cpu.primitives.records import Address, Record, address_of
from executor_service.backends.torch_backend.cpu.rowwise.norm import NormRows
from executor_service.backends.torch_backend.cpu.threads.call_table import CallTable
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool
from executor_service.backends.torch_backend.ops.kernels import AttentionWeights, Block
from executor_service.backends.torch_backend.ops.page_format import LayerCache

_MAX_TOKENS = 256  # in larger steps Python's share of the time is negligible

_NOWHERE = Address(0)  # placeholder until the first batch
_NO_PLACES = Places(_NOWHERE, _NOWHERE, _NOWHERE)
_NO_ITEMS = Items(0, _NOWHERE, _NOWHERE, _NOWHERE, _NOWHERE, 0, _NOWHERE, 0)
_NO_PAGES = Pages(_NOWHERE, _NOWHERE, _NOWHERE, 0, 0, 0, 0)


def norm_call(
    rows: int,
    x: Address,
    out: Address,
    weight: torch.Tensor,
    eps: float,
    *,
    add: bool = False,
    strides: tuple[int, int] | None = None,
) -> NormRows:
    """RMSNorm of rows; `strides` of x and of out, in numbers, where rows do not follow each other."""
    n = len(weight)
    x_stride, out_stride = strides or (n, n)
    return NormRows(rows, x, x_stride, address_of(weight), out, out_stride, n, eps, add)


def attention_calls(
    rows: int, places: Places, items: Items, pages: Pages, qkv: Address, out: Address, w: AttentionWeights
) -> tuple[RotateQkv, AttendPages]:
    """The call that norms and rotates q and k and writes k and v into pages, and the call of attention."""
    group = w.heads // w.kv_heads
    rotate = RotateQkv(
        rows=rows,
        places=places,
        pages=pages,
        qkv=qkv,
        heads_per_kv_head=group,
        cos=address_of(w.cos),
        sin=address_of(w.sin),
        context=len(w.cos),
        half=w.cos.shape[1],
        q_norm=address_of(w.q_norm),
        k_norm=address_of(w.k_norm),
        norm_size=len(w.q_norm),
        eps=w.eps,
        query_scales=address_of(w.query_scales),
        scaled=len(w.query_scales),
        query_gains=address_of(w.query_gains),
        gained=len(w.query_gains),
    )
    attend = AttendPages(
        rows=rows,
        items=items,
        pages=pages,
        qkv=qkv,
        heads_per_kv_head=group,
        out=out,
        scale=w.scale,
        window=w.window or len(w.cos),
        score_cap=w.score_cap,
        sinks=address_of(w.sinks),
        sink_heads=len(w.sinks),
    )
    return rotate, attend


class CpuRecordedBlocks:
    """Calls recorded once for all batches of up to `max_tokens` tokens; each batch sets some fields."""

    max_tokens = _MAX_TOKENS

    def __init__(
        self, pool: ThreadPool, buffers: Sequence[torch.Tensor], calls: Sequence[Record], keep: object
    ) -> None:
        """`calls` turn the first buffer, [max_tokens, hidden], into the last block's result, in place.

        They hold addresses in `buffers` and `keep`, which are therefore referenced here. A block has one
        RotateQkv, then one AttendPages.
        """
        self._pool, self._buffers, self._keep = pool, buffers, keep
        self._table = CallTable(calls)
        self._rows, self._pages = self._table.field("rows"), self._table.field("pages")
        self._places, self._items = self._table.field("places"), self._table.field("items")
        self._groups = self._table.field("groups")
        self._caches: Sequence[LayerCache] | None = None  # whose pages the table has

    def __call__(
        self,
        x: torch.Tensor,
        prepared: PreparedBatch,
        caches: Sequence[LayerCache],
        changes: CpuStepChanges | None = None,
    ) -> torch.Tensor:
        """x [tokens, hidden] through all blocks. The result is valid until the next call."""
        result = self._buffers[0][: len(x)]
        result.copy_(x)
        self._rows.set([len(x)])
        self._places.set(prepared.places)
        self._items.set(prepared.items)
        self._groups.set(NO_GROUPS if changes is None else changes.groups)
        if caches is not self._caches:
            self._pages.set_each(np.repeat([Pages.of(cache) for cache in caches], 2, axis=0))
            self._caches = caches
        self._pool.run_table(self._table)
        return result


def record_blocks(
    pool: ThreadPool, blocks: Sequence[Block], eps: float, low_rank: CpuLowRank
) -> CpuRecordedBlocks | None:
    """Record blocks, all of one shape; None if some of their products are not CPU kernels."""
    rows, first = _MAX_TOKENS, blocks[0]
    w = first.attention
    if not isinstance(first.gated, ThreadedGated) or not isinstance(first.down, ThreadedLinear):
        return None
    hidden, width = first.down.width, (w.heads + 2 * w.kv_heads) * w.head_dim
    widths = hidden, hidden, width, w.heads * w.head_dim, first.gated.width
    buffers = [torch.empty(rows, width) for width in widths]
    x, normed, qkv, attended, inner = (address_of(buffer) for buffer in buffers)

    def read(norm: torch.Tensor | None) -> Address:
        """Where attention and MLP find their input."""
        if norm is None:
            return x
        calls.append(norm_call(rows, x, normed, norm, eps))
        return normed

    def add(linear: ThreadedLinear, at: Address, norm: torch.Tensor | None, change: RowChanges) -> None:
        """x += the linear layer's result, normed if there is a norm."""
        if norm is None:
            calls.extend(linear.calls(rows, at, x, True, change))
        else:
            calls.extend(linear.calls(rows, at, normed, False, change))
            calls.append(norm_call(rows, normed, x, norm, eps, add=True))

    calls: list[Record] = []
    shrunk = low_rank.shrunk(rows)
    for layer, b in enumerate(blocks):
        if not isinstance(b.qkv, ThreadedLinear) or not isinstance(b.output, ThreadedLinear):
            return None
        if not isinstance(b.gated, ThreadedGated) or not isinstance(b.down, ThreadedLinear):
            return None
        change = recorded_changes(layer, shrunk)
        calls += b.qkv.calls(rows, read(b.attention_norm), qkv, False, change.qkv)
        at, width = qkv, buffers[2].shape[1]
        for norm in b.qk_norms or ():
            calls.append(norm_call(rows, at, at, norm, eps, strides=(width, width)))
            at = Address(at + 4 * len(norm))
        calls += attention_calls(rows, _NO_PLACES, _NO_ITEMS, _NO_PAGES, qkv, attended, b.attention)
        add(b.output, attended, b.output_norm, change.output)
        calls += b.gated.calls(rows, read(b.mlp_norm), inner, change.gated)
        add(b.down, inner, b.down_norm, change.down)
    return CpuRecordedBlocks(pool, buffers, calls, (blocks, low_rank))
