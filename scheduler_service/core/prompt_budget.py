"""How many tokens of a prompt a step can feed: for its time, and for what its answer has room for."""

from __future__ import annotations

from scheduler_service.core.policy import JointLimits
from scheduler_service.core.schedule import Schedule
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.step import RowMode

SCORED_COST = 3, 2
"""Of a step's tokens, a token that brings a score counts as 3/2: it needs the output layer. With a model of
135 M parameters, a fifth of them in that layer, it takes 1.4 times the CPU time of another prompt token."""


class PromptBudget:
    """What is left of a step for prompts."""

    def __init__(self, schedule: Schedule, limits: JointLimits) -> None:
        self._schedule, self._limits = schedule, limits

    def chunk(self, sequence: LiveSequence, kv: int) -> int:
        """How many tokens of a prompt, of which `kv` are computed, the step can feed."""
        tokens = min(self._limits.chunk_tokens, self._schedule.tokens_left)
        if sequence.score_bytes and tokens > (plain := _unscored(sequence, kv)):
            cost, unit = SCORED_COST
            tokens = plain + (tokens - plain) * unit // cost or min(1, tokens)
        return min(tokens, self.answerable(sequence), sequence.to_compute + sequence.kv - kv)

    def spend(self, sequence: LiveSequence, kv: int, tokens: int) -> None:
        """Count what so many tokens of a prompt bring back, and what it takes beside feeding them."""
        schedule = self._schedule
        schedule.bytes_left -= self._output_bytes(sequence, tokens)
        if sequence.score_bytes and (scored := tokens - _unscored(sequence, kv)) > 0:
            cost, unit = SCORED_COST
            schedule.tokens_left = max(0, schedule.tokens_left - scored * (cost - unit) // unit)

    def answerable(self, sequence: LiveSequence) -> int:
        """Of the tokens left to compute, how many can be fed so that the answer has room for their scores."""
        left, tokens = self._schedule.bytes_left, sequence.to_compute
        if size := sequence.score_bytes:
            return min(tokens, left // size)
        return tokens if self._output_bytes(sequence, tokens) <= left else 0

    def _output_bytes(self, sequence: LiveSequence, tokens: int) -> int:
        """Maximum size of what the executor answers of a prompt, if so many tokens of it are fed."""
        vector = self._limits.vector_bytes if sequence.mode is RowMode.HIDDEN else 0
        return vector + tokens * sequence.score_bytes


def _unscored(sequence: LiveSequence, kv: int) -> int:
    """Of the tokens from position `kv` on, how many are fed before the first one that brings a score."""
    return max(0, sequence.next_score - 1 - kv)
