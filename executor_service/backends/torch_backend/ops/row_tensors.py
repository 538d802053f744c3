"""The rows of one step for the model: as arrays (`Layout`), and as tensors on its device (`Batch`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.forward_rows import ForwardRow, ForwardRows, RowColumns
from executor_service.backends.prompt_outputs import states_of

LOGITS_ROWS = 256
"""Output positions per logits tensor; logits are the largest tensor of a step."""

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows, concatenated."""

    tokens: Ints  # [tokens]
    positions: Ints  # [tokens]
    pages: Ints  # [tokens]: page of each token's K and V
    slots: Ints  # [tokens]: slot in that page
    counts: Ints  # [rows]: tokens of each row
    starts: Ints  # [rows]: positions of their first tokens
    tables: Ints  # concatenated block tables
    table_starts: Ints  # [rows]
    output_counts: Ints  # [rows]
    outputs: Ints  # [outputs]: indices of the tokens at output positions


def lay_out(rows: RowColumns, page_size: int) -> Layout:
    """The layout of the rows, in their order."""
    starts, counts = rows.starts, rows.counts
    tables = np.concatenate(rows.tables)
    lengths = np.array([len(table) for table in rows.tables], np.int32)
    table_starts = lengths.cumsum(dtype=np.int32) - lengths
    if len(rows.tokens) == len(starts):  # one token each, as in most steps
        positions, first_pages, outputs = starts, table_starts, np.flatnonzero(rows.outputs).astype(np.int32)
    else:
        ends = counts.cumsum(dtype=np.int32)
        positions = np.arange(ends[-1], dtype=np.int32) + (starts - ends + counts).repeat(counts)
        first_pages, outputs = table_starts.repeat(counts), _last(rows.outputs, ends)
    page_numbers, slots = np.divmod(positions, page_size)
    return Layout(
        tokens=rows.tokens,
        positions=positions,
        pages=tables[page_numbers + first_pages],
        slots=slots,
        counts=counts,
        starts=starts,
        tables=tables,
        table_starts=table_starts,
        output_counts=rows.outputs,
        outputs=outputs,
    )


def _last(counts: Ints, ends: Ints) -> Ints:
    """Indices of the last `counts` tokens of each row; a row's tokens are those before its `ends`."""
    sums = counts.cumsum(dtype=np.int32)
    indices: Ints = np.arange(sums[-1], dtype=np.int32) + (ends - sums).repeat(counts)
    return indices


@dataclass(frozen=True, slots=True)
class Batch:
    """A `Layout` on a device, int32 unless noted; `counts` and `starts` stay on the host."""

    tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # [tokens]
    pages: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]
    counts: Ints  # [rows]
    starts: Ints  # [rows]
    tables: torch.Tensor  # [rows, max pages of a row]: block tables, padded with page 0
    states: torch.Tensor  # int64 [states]: indices of the tokens whose states are needed, for `prompt`s too

    @classmethod
    def of(cls, rows: ForwardRows, page_size: int, device: torch.device) -> Batch:
        """The batch of these rows, in their order."""
        layout = lay_out(rows.columns(page_size), page_size)
        states = layout.outputs
        if any(row.prompt is not None for row in rows):
            ends = layout.counts.cumsum(dtype=np.int32)
            states = _last(np.array([states_of(row) for row in rows], np.int32), ends)
        lengths = np.append(layout.table_starts[1:], len(layout.tables)) - layout.table_starts
        tables = np.zeros((len(rows), lengths.max()), np.int32)
        tables[np.arange(tables.shape[1]) < lengths[:, None]] = layout.tables

        def put(values: NDArray[np.integer]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            tokens=put(layout.tokens.astype(np.int64)),
            positions=put(layout.positions),
            pages=put(layout.pages),
            slots=put(layout.slots),
            counts=layout.counts,
            starts=layout.starts,
            tables=put(tables),
            states=put(states.astype(np.int64)),
        )


def parts(rows: Sequence[ForwardRow]) -> Iterator[list[ForwardRow]]:
    """Consecutive groups of rows, each closed when it has at least LOGITS_ROWS outputs."""
    part: list[ForwardRow] = []
    outputs = 0
    for row in rows:
        part.append(row)
        outputs += row.outputs
        if outputs >= LOGITS_ROWS:
            yield part
            part, outputs = [], 0
    if part:
        yield part
