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
    ThreadedGated,
    ThreadedLinear,
)
from executor_service.backends.torch_backend.cpu.primitives.records import Address, Record, address_of
from executor_service.backends.torch_backend.cpu.rowwise.norm import NormRows
from executor_service.backends.torch_backend.cpu.threads.call_table import CallTable
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool
from executor_service.backends.torch_backend.kernels import AttentionWeights, Block, LayerCache

_MAX_TOKENS = 256  # in larger steps Python's share of the time is negligible

_NOWHERE = Address(0)  # placeholder until the first batch
_NO_PLACES = Places(_NOWHERE, _NOWHERE, _NOWHERE)
_NO_ITEMS = Items(0, _NOWHERE, _NOWHERE, _NOWHERE, _NOWHERE, 0, _NOWHERE, 0)
_NO_PAGES = Pages(_NOWHERE, _NOWHERE, 0, 0, 0, 0)


def norm_call(rows: int, x: Address, weight: torch.Tensor, out: Address, eps: float) -> NormRows:
    """RMSNorm of rows."""
    return NormRows(rows=rows, x=x, weight=address_of(weight), out=out, n=len(weight), eps=eps)


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
        q_norm=address_of(w.q_norm),
        k_norm=address_of(w.k_norm),
        norm_size=len(w.q_norm),
        eps=w.eps,
    )
    window = w.window or len(w.cos)
    return rotate, AttendPages(rows, items, pages, qkv, group, out, w.scale, window)


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
        self._rows.set(len(x))
        self._places.set(prepared.places)
        self._items.set(prepared.items)
        self._groups.set(NO_GROUPS if changes is None else changes.groups)
        self._pages.set(np.repeat([Pages.of(cache) for cache in caches], 2, axis=0))
        self._pool.run_table(self._table)
        return result


def record_blocks(
    pool: ThreadPool, blocks: Sequence[Block], eps: float, low_rank: CpuLowRank
) -> CpuRecordedBlocks | None:
    """Record blocks, all of one shape; None if some of their products are not CPU kernels."""
    rows, first = _MAX_TOKENS, blocks[0]
    hidden, w = len(first.attention_norm), first.attention
    if not isinstance(first.gated, ThreadedGated):
        return None
    widths = hidden, hidden, (w.heads + 2 * w.kv_heads) * w.head_dim, w.heads * w.head_dim, first.gated.width
    buffers = [torch.empty(rows, width) for width in widths]
    x, normed, qkv, attended, inner = (address_of(buffer) for buffer in buffers)
    calls: list[Record] = []
    shrunk = low_rank.shrunk(rows)
    for layer, b in enumerate(blocks):
        if not isinstance(b.qkv, ThreadedLinear) or not isinstance(b.output, ThreadedLinear):
            return None
        if not isinstance(b.gated, ThreadedGated) or not isinstance(b.down, ThreadedLinear):
            return None
        change = recorded_changes(layer, shrunk)
        calls.append(norm_call(rows, x, b.attention_norm, normed, eps))
        calls += b.qkv.calls(rows, normed, qkv, False, change.qkv)
        calls += attention_calls(rows, _NO_PLACES, _NO_ITEMS, _NO_PAGES, qkv, attended, b.attention)
        calls += b.output.calls(rows, attended, x, True, change.output)
        calls.append(norm_call(rows, x, b.mlp_norm, normed, eps))
        calls += b.gated.calls(rows, normed, inner, change.gated)
        calls += b.down.calls(rows, inner, x, True, change.down)
    return CpuRecordedBlocks(pool, buffers, calls, (blocks, low_rank))
