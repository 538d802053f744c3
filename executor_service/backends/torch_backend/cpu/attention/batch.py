"""`PreparedBatch`: the places of a batch's tokens, and the items into which attention cuts the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from executor_service.backends.torch_backend.cpu.attention.attend import ITEM_ROWS, Items
from executor_service.backends.torch_backend.cpu.attention.rotate import Places
from executor_service.backends.torch_backend.cpu.primitives.records import address_of
from executor_service.backends.torch_backend.ops.row_tensors import Batch


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Records with addresses of arrays, and the arrays."""

    places: Places
    items: Items
    keep: tuple[object, ...]


def prepare_batch(batch: Batch, heads_per_kv_head: int) -> PreparedBatch:
    """The batch cut into items of up to ITEM_ROWS query vectors, or of one position if that has more."""
    max_tokens = max(ITEM_ROWS // heads_per_kv_head, 1)
    ends = np.cumsum(batch.counts)
    rows, first_tokens, first_positions, tokens = [], [], [], []
    for row, (start, count, end) in enumerate(zip(batch.starts, batch.counts, ends, strict=True)):
        for first in range(0, count, max_tokens):
            rows.append(row)
            first_tokens.append(end - count + first)
            first_positions.append(start + first)
            tokens.append(min(max_tokens, count - first))
    columns = np.array([rows, first_tokens, first_positions, tokens], np.int32)
    items = Items(
        size=len(rows),
        rows=address_of(columns[0]),
        first_tokens=address_of(columns[1]),
        first_positions=address_of(columns[2]),
        tokens=address_of(columns[3]),
        max_queries=max_tokens * heads_per_kv_head,
        tables=address_of(batch.tables),
        width=batch.tables.shape[1],
    )
    places = Places(address_of(batch.positions), address_of(batch.pages), address_of(batch.slots))
    return PreparedBatch(places, items, (batch, columns))
