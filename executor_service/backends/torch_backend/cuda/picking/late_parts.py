"""What the device has to know of positions that are picked again, made of their rows on the host.

In the functions here `rows` are those that have such positions, and `numbers` [positions] says to which of
them each position belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow
from executor_service.backends.torch_backend.cuda.layout.host_buffers import Parts
from executor_service.backends.torch_backend.cuda.picking.late_plan import LatePlan, first_length
from executor_service.backends.torch_backend.cuda.picking.listed_tokens import Stops
from executor_service.backends.torch_backend.cuda.picking.penalties import Histories
from executor_service.backends.torch_backend.ops.sampler import masks_stops, penalizes
from executor_service.contract.plan import NO_TOKENS

Ints = NDArray[np.int32]

_FOREVER = np.iinfo(np.int32).max  # tokens


class LateParts:
    """All of that for some positions of a plan, as one upload; what nobody needs is left out."""

    def __init__(self, rows: Sequence[ForwardRow], plan: LatePlan, part: slice, page_size: int) -> None:
        """`part`: positions that are picked again."""
        indices, inverse = np.unique(plan.owners[part], return_inverse=True)
        numbers: Ints = inverse.astype(np.int32)
        mine = [rows[i] for i in indices.tolist()]
        parts: dict[str, NDArray[np.generic]] = {}
        samplings = [row.sampling for row in mine]
        self.penalized = any(penalizes(s) for s in samplings)
        self.biased = any(s.logit_bias for s in samplings)
        self.masked = any(row.masks is not None for row in mine)
        stopping = [row for row in mine if masks_stops(row, first_length(row))]
        self.max_stops = max((len(row.sampling.stop_token_ids) for row in stopping), default=0)
        if self.penalized:
            parts |= _history_parts(mine, numbers, page_size)
        if self.biased:
            parts |= _bias_parts(mine, numbers)
        if self.max_stops:
            parts |= _stop_parts(mine, numbers)
        if self.masked:
            parts |= _mask_parts(mine, numbers, plan.offsets[part])
        self.parts: Parts = parts


def histories(sent: Mapping[str, torch.Tensor], lengths: torch.Tensor) -> Histories:
    """Of an upload of `LateParts`; lengths [positions]: of the positions' histories, in tokens."""
    fields = {name: sent[name] for name in Histories.__slots__ if name != "lengths"}
    return Histories(lengths=lengths * sent["counted"], **fields)


def stops(sent: Mapping[str, torch.Tensor], lengths: torch.Tensor) -> Stops:
    """The same. A position whose history is long enough has an empty list."""
    begins = sent["stop_begins"]
    return Stops(
        sent["stop_ids"], begins, torch.where(lengths < sent["stop_until"], sent["stop_ends"], begins)
    )


def _history_parts(rows: Sequence[ForwardRow], numbers: Ints, page_size: int) -> Parts:
    """The fields of `Histories` but the lengths, and whether the position's history is counted (0 or 1)."""
    samplings = [row.sampling for row in rows]
    with_penalties = np.array([penalizes(s) for s in samplings], np.int32)
    pages = [-(-len(row.history) // page_size) if penalizes(row.sampling) else 0 for row in rows]
    tables = [row.block_table[:count] for row, count in zip(rows, pages, strict=True)]
    begins = np.cumsum(pages, dtype=np.int32) - np.array(pages, np.int32)
    return {
        "tables": np.concatenate(tables),
        "table_begins": begins[numbers],
        "counted": with_penalties[numbers],
        "prompt_lengths": np.array([row.prompt_length for row in rows], np.int32)[numbers],
        "repetitions": np.array([s.repetition_penalty for s in samplings], np.float32)[numbers],
        "presences": np.array([s.presence_penalty for s in samplings], np.float32)[numbers],
        "frequencies": np.array([s.frequency_penalty for s in samplings], np.float32)[numbers],
    }


def _bias_parts(rows: Sequence[ForwardRow], numbers: Ints) -> Parts:
    """The fields of `Biases`."""
    pairs = [pair for row in rows for pair in row.sampling.logit_bias]
    sizes = np.array([len(row.sampling.logit_bias) for row in rows], np.int32)
    ends = np.cumsum(sizes, dtype=np.int32)
    return {
        "bias_ids": np.array([token for token, _ in pairs], np.int32),
        "biases": np.array([bias for _, bias in pairs], np.float32),
        "bias_begins": (ends - sizes)[numbers],
        "bias_ends": ends[numbers],
    }


def _stop_parts(rows: Sequence[ForwardRow], numbers: Ints) -> Parts:
    """The fields of `Stops`, and the length of the history from which on the row has none."""
    lists = [sorted(set(row.sampling.stop_token_ids)) for row in rows]
    sizes = np.array([len(ids) for ids in lists], np.int32)
    ends = np.cumsum(sizes, dtype=np.int32)
    until = [row.prompt_length + row.sampling.min_tokens if row.sampling.min_tokens else 0 for row in rows]
    return {
        "stop_ids": np.concatenate([NO_TOKENS, *(np.array(ids, np.int32) for ids in lists)]),
        "stop_begins": (ends - sizes)[numbers],
        "stop_ends": ends[numbers],
        "stop_until": np.minimum(np.array(until, np.int64), _FOREVER).astype(np.int32)[numbers],
    }


def _mask_parts(rows: Sequence[ForwardRow], numbers: Ints, offsets: Ints) -> Parts:
    """The masks of the positions that have one, as words, and which positions these are.

    offsets [positions]: which of its row's outputs the position is.
    """
    found = [
        (place, masks[offset])
        for place, (i, offset) in enumerate(zip(numbers.tolist(), offsets.tolist(), strict=True))
        if (masks := rows[i].masks) is not None and offset < len(masks)
    ]
    return {
        "words": np.stack([mask for _, mask in found]).view(np.int32),
        "mask_places": np.array([place for place, _ in found], np.int32),
    }
