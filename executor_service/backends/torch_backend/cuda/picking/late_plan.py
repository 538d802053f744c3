"""`LatePlan`: the positions of a step that need more than the token that its launch picks.

    picked     masks, penalties, biases, masked stop ids: the token is picked again
    measured   logprobs: of the picked token, or of a given token of a prompt
    copied     the logits themselves

The picked positions come first, and the measured ones follow each other. So any slice of the positions is
computed from one tensor of logits, of which those that are picked, measured and copied are slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.ops.sampler import masks_stops, penalizes
from executor_service.contract.plan import NO_TOKENS, OutputMode, TokenIds

Ints = NDArray[np.int32]

_FULL, _TOP_K, _SAMPLE = OutputMode.FULL, OutputMode.TOP_K, OutputMode.SAMPLE


class LateSpan(NamedTuple):
    """Consecutive positions of one row."""

    row: int
    positions: int
    first_token: int  # index of the first among the step's tokens
    first_output: int  # index of the first among the step's outputs
    targets: TokenIds = NO_TOKENS  # of a prompt: the tokens that are measured; none: the picked ones


@dataclass(frozen=True, slots=True)
class LatePlan:
    """The positions, [positions] each."""

    spans: list[LateSpan]  # in the order of the positions
    again: int  # the first `again` positions are picked
    measured: range
    copied: range
    alternatives: int  # how many of the likeliest tokens are measured at each position
    owners: Ints  # the position's row
    offsets: Ints  # its index among those of its span
    tokens: Ints  # index among the step's tokens
    outputs: Ints  # index among the step's outputs; 0 for a prompt's targets, which are none
    known: Ints  # the token that is measured; -1: the picked one

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def spans_again(self) -> list[LateSpan]:
        """Those of the picked positions, which are whole rows' outputs."""
        ends = accumulate(span.positions for span in self.spans)
        return [span for span, end in zip(self.spans, ends, strict=True) if end <= self.again]


def plan_late(rows: ForwardRows, indices: Sequence[int], *, prompts: bool) -> LatePlan | None:
    """The plan for some rows of a step, with `prompts` also for the targets of prompts; None: empty.

    indices: none of rows that only decode.
    """
    special = [i for i in indices if rows[i].outputs and _is_special(rows[i])]
    others, first = rows.others, rows.decodes  # rows, tokens and outputs before them
    scored = []
    if prompts:
        scored = [i for i, row in others.items() if row.prompt is not None and len(row.prompt.targets)]
    if not (special or scored):
        return None
    token_ends = (first + np.cumsum([len(row.tokens) for row in others.values()])).tolist()
    output_ends = (first + np.cumsum([row.outputs for row in others.values()])).tolist()

    def outputs_of(i: int) -> LateSpan:
        count = rows[i].outputs
        return LateSpan(i, count, token_ends[i - first] - count, output_ends[i - first] - count)

    def targets_of(i: int) -> LateSpan:
        row = rows[i]
        assert row.prompt is not None
        before = row.start + len(row.tokens) - (row.prompt.first - 1)  # tokens from the first target's on
        return LateSpan(i, len(row.prompt.targets), token_ends[i - first] - before, 0, row.prompt.targets)

    again = [i for i in special if picks_again(rows[i])]
    both = [i for i in again if _is_measured(rows[i])]
    groups = [
        [outputs_of(i) for i in again if not _is_measured(rows[i])],
        [outputs_of(i) for i in both],
        [outputs_of(i) for i in special if _is_measured(rows[i]) and not picks_again(rows[i])],
        [targets_of(i) for i in scored],
        [outputs_of(i) for i in special if rows[i].output is _FULL],
    ]
    ends = np.cumsum([sum(span.positions for span in group) for group in groups]).tolist()
    spans = [span for group in groups for span in group]
    counts = np.array([span.positions for span in spans], np.int32)
    offsets = np.arange(ends[-1], dtype=np.int32) - np.repeat(
        np.cumsum(counts, dtype=np.int32) - counts, counts
    )

    def each(values: list[int]) -> Ints:
        return np.repeat(np.array(values, np.int32), counts)

    known = np.full(ends[-1], -1, np.int32)
    known[ends[2] : ends[3]] = np.concatenate([NO_TOKENS, *(span.targets for span in groups[3])])
    outputs = each([span.first_output for span in spans]) + offsets
    outputs[ends[2] : ends[3]] = 0
    measured = [rows[span.row] for group in groups[1:4] for span in group]
    return LatePlan(
        spans=spans,
        again=ends[1],
        measured=range(ends[0], ends[3]),
        copied=range(ends[3], ends[4]),
        alternatives=max((alternatives_of(row) for row in measured), default=0),
        owners=each([span.row for span in spans]),
        offsets=offsets,
        tokens=each([span.first_token for span in spans]) + offsets,
        outputs=outputs,
        known=known,
    )


def picks_again(row: ForwardRow) -> bool:
    """Whether its tokens are not those that the launch picks, which knows of no mask, penalty or bias."""
    if row.output is not _SAMPLE:
        return False
    s = row.sampling
    return row.masks is not None or penalizes(s) or bool(s.logit_bias) or masks_stops(row, first_length(row))


def first_length(row: ForwardRow) -> int:
    """Length of the history of the row's first output, in tokens, at least."""
    return row.start - row.slack + len(row.tokens) - row.outputs + 1


def masked_outputs(row: ForwardRow) -> int:
    """How many outputs the row has: masks that come late may be those of the first ones alone."""
    return row.outputs if row.masks is None else len(row.masks)


def alternatives_of(row: ForwardRow) -> int:
    """How many of the likeliest tokens the row wants measured."""
    return row.top_k if row.output is _TOP_K else row.sampling.logprobs or 0


def _is_measured(row: ForwardRow) -> bool:
    return row.output is _TOP_K or (row.output is _SAMPLE and row.sampling.logprobs is not None)


def _is_special(row: ForwardRow) -> bool:
    return row.output is _FULL or _is_measured(row) or picks_again(row)
