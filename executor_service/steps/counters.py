"""Counters of what the executor has computed since it started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from executor_service.contract.plan import OpResult, Reason, RowResults


class StepTally(NamedTuple):
    """What one step computed. A prefill row computed prompt tokens; a refused row is neither."""

    tokens_computed: int = 0
    tokens_sampled: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0


@dataclass(slots=True)
class StepCounters:
    """Totals since the start. Written by the device thread, read by others."""

    steps: int = 0
    steps_abandoned: int = 0  # cancelled before they began, or between two forwards
    rows: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0
    compute_s: float = 0.0
    prefill_steps: int = 0  # steps with a row that computed prompt tokens
    decode_steps: int = 0  # of the others, those with a row that was not refused
    prefill_s: float = 0.0  # part of compute_s
    decode_s: float = 0.0
    prefill_rows: int = 0
    decode_rows: int = 0
    sessions_expired: int = 0
    caches_expired: int = 0
    refused: Counter[Reason] = field(default_factory=Counter)  # rows and ops

    def add_step(self, tally: StepTally, elapsed_s: float, rows: RowResults, ops: Iterable[OpResult]) -> None:
        """Count a step that is done; `elapsed_s` is its time on the device, in seconds."""
        self.steps += 1
        self.compute_s += elapsed_s
        self.rows += len(rows)
        self.tokens_computed += tally.tokens_computed
        self.tokens_sampled += tally.tokens_sampled
        self.drafts_verified += tally.drafts_verified
        self.drafts_accepted += tally.drafts_accepted
        self.prefill_rows += tally.prefill_rows
        self.decode_rows += tally.decode_rows
        if tally.prefill_rows:
            self.prefill_steps += 1
            self.prefill_s += elapsed_s
        elif tally.decode_rows:
            self.decode_steps += 1
            self.decode_s += elapsed_s
        for row in rows.others.values():
            if row.refusal is not None:
                self.refused[row.refusal.reason] += 1
        for op in ops:
            if op.refusal is not None:
                self.refused[op.refusal.reason] += 1
