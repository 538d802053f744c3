"""`Batch`: one step's rows laid out for the model, on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows end to end; every array int32 but the ids that index.

    `counts`, `starts` and `tables` are per row, the rest per token.
    """

    tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # [tokens]
    pages: torch.Tensor  # [tokens]: where each token's K and V go
    slots: torch.Tensor  # [tokens]: and the slot in that page
    counts: NDArray[np.int32]  # [rows]: tokens of each row
    starts: NDArray[np.int32]  # [rows]: positions of their first tokens
    tables: torch.Tensor  # [rows, most pages of a row]: block tables, filled up with page 0
    outputs: torch.Tensor  # int64 [outputs]: the tokens whose logits are wanted


def lay_out(rows: Sequence[ForwardRow], page_size: int, device: torch.device) -> Batch:
    """The batch of these rows, in their order."""
    counts = np.array([len(row.tokens) for row in rows], np.int32)
    starts = np.array([row.start for row in rows], np.int32)
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(starts - (ends - counts), counts).astype(
        np.int32
    )
    lengths = [-(-(row.start + len(row.tokens)) // page_size) for row in rows]
    tables = np.zeros((len(rows), max(lengths)), np.int32)
    for table, row, length in zip(tables, rows, lengths, strict=True):
        table[:length] = row.block_table[:length]
    pages = tables[np.repeat(np.arange(len(rows)), counts), positions // page_size]
    outputs = [np.arange(end - row.outputs, end) for row, end in zip(rows, ends, strict=True)]

    def put(values: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return Batch(
        tokens=put(np.concatenate([row.tokens for row in rows]).astype(np.int64)),
        positions=put(positions),
        pages=put(pages),
        slots=put(positions % np.int32(page_size)),
        counts=counts,
        starts=starts,
        tables=put(tables),
        outputs=put(np.concatenate(outputs).astype(np.int64)),
    )
