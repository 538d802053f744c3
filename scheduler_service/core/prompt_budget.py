"""How many tokens of a prompt a step can feed: for its time, and for what its answer has room for.

A step with prompts beside sequences that decode is bounded by its predicted time, so that nobody's prompt or
evaluation slows others' streams much: by `step_budget_s`, or without one by STEP_TIMES times what the step
takes without the prompts. The prompts get what the decodes leave of that, and LEAST_PART in any case. One
prompt gets a token even where that takes longer, or as many as make the step worth what it takes beside them.
While nothing decodes, only tokens bound a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.schedule import Schedule
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.speculation.step_time import StepTime, Work
from scheduler_service.core.states import SequenceState
from scheduler_service.core.step import RowMode

STEP_TIMES = 2.5
"""A step with prompts takes at most this many times what its decodes alone take. So streams keep two fifths
of their speed, and prompts get three fifths of the time: one takes 1.7 times as long as if no time bounded
its steps."""
LEAST_PART = 0.25
"""Of the time that a step's decodes take: the prompts get so much, even where `step_budget_s` leaves less."""
WORTH = 0.5
"""A prompt's tokens may take this part of what any of them takes (its cache is read once for all of them, and
the executor may have a slower path for steps with prompts), whatever the budget is: prompts make progress."""
SCORED_COST = 3, 2
"""Of a step's tokens, a token that brings a score counts as 3/2: it needs the output layer. With a model of
135 M parameters, a fifth of them in that layer, it takes 1.4 times the CPU time of another prompt token."""


class Reserved(NamedTuple):
    """A part of a step's budget, kept for later."""

    tokens: int
    seconds: float


class PromptBudget:
    """What is left of a step for prompts."""

    def __init__(self, schedule: Schedule, limits: JointLimits, step_time: StepTime) -> None:
        self._schedule, self._limits, self._time = schedule, limits, step_time
        self._seconds = inf
        self._is_first = True  # no prompt has tokens in the step
        self._makes_progress = False  # a prompt has, but for those that are given back what was kept

    def bound(self, running: Iterable[LiveSequence]) -> None:
        """Leave to prompts what the sequences that decode leave of the step's time."""
        decoding = SequenceState.RUNNING
        lengths = [sequence.kv for sequence in running if sequence.state is decoding]
        if lengths:
            rows = len(lengths)
            alone_s = self._time.seconds(Work(rows, rows, sum(lengths) + rows))
            budget_s = self._limits.step_budget_s or STEP_TIMES * alone_s
            self._seconds = max(budget_s - alone_s, LEAST_PART * alone_s)

    def keep_half(self) -> Reserved:
        """Take half of what is left out of the step, to be given back later."""
        schedule = self._schedule
        seconds = 0.0 if self._seconds == inf else self._seconds / 2
        kept = Reserved(schedule.tokens_left // 2, seconds)
        schedule.tokens_left -= kept.tokens
        self._seconds -= kept.seconds
        return kept

    def give_back(self, kept: Reserved) -> None:
        """Let the next prompts have what was kept."""
        self._schedule.tokens_left += kept.tokens
        self._seconds += kept.seconds
        self._makes_progress = False

    def chunk(self, sequence: LiveSequence, kv: int) -> int:
        """How many tokens of a prompt, of which `kv` are computed, the step can feed."""
        tokens = min(self._limits.chunk_tokens, self._schedule.tokens_left)
        if sequence.score_bytes and tokens > (plain := _unscored(sequence, kv)):
            cost, unit = SCORED_COST
            tokens = plain + (tokens - plain) * unit // cost or min(1, tokens)
        tokens = min(tokens, self.answerable(sequence), sequence.to_compute + sequence.kv - kv)
        if self._seconds == inf or tokens < 1:
            return tokens
        within = bisect_right(
            range(1, tokens + 1), self._seconds, key=lambda count: self._seconds_of(sequence, kv, count)
        )
        return within if self._makes_progress else max(within, min(tokens, self._worth(sequence, kv)))

    def spend(self, sequence: LiveSequence, kv: int, tokens: int) -> None:
        """Count what `tokens` of a prompt bring back, and what it takes beside feeding them."""
        schedule = self._schedule
        schedule.bytes_left -= self._output_bytes(sequence, tokens)
        if sequence.score_bytes and (scored := tokens - _unscored(sequence, kv)) > 0:
            cost, unit = SCORED_COST
            schedule.tokens_left = max(0, schedule.tokens_left - scored * (cost - unit) // unit)
        if self._seconds < inf:
            self._seconds = max(0.0, self._seconds - self._seconds_of(sequence, kv, tokens))
        self._is_first = False
        self._makes_progress = True

    def _seconds_of(self, sequence: LiveSequence, kv: int, tokens: int) -> float:
        scored = max(0, tokens - _unscored(sequence, kv)) if sequence.score_bytes else 0
        return self._time.prompt_s(kv, tokens, scored, first=self._is_first)

    def _worth(self, sequence: LiveSequence, kv: int) -> int:
        """The tokens that a step may feed whatever the budget is, at least 1."""
        one_s, fixed_s = self._seconds_of(sequence, kv, 1), self._seconds_of(sequence, kv, 0)
        return max(1, int(WORTH * fixed_s / max(one_s - fixed_s, 1e-9)))

    def answerable(self, sequence: LiveSequence) -> int:
        """Of the tokens left to compute, how many can be fed so that the answer has room for their scores."""
        left, tokens = self._schedule.bytes_left, sequence.to_compute
        if size := sequence.score_bytes:
            return min(tokens, left // size)
        return tokens if self._output_bytes(sequence, tokens) <= left else 0

    def _output_bytes(self, sequence: LiveSequence, tokens: int) -> int:
        """Maximum size of what the executor answers of a prompt, if `tokens` of it are fed."""
        vector = self._limits.vector_bytes if sequence.mode is RowMode.HIDDEN else 0
        return vector + tokens * sequence.score_bytes


def _unscored(sequence: LiveSequence, kv: int) -> int:
    """Of the tokens from position `kv` on, how many are fed before the first one that brings a score."""
    return max(0, sequence.next_score - 1 - kv)
