"""Choices as pure functions: what fits, which sequences are preempted, which may run ahead of answers."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.step import Capacity


@dataclass(frozen=True, slots=True)
class JointLimits:
    """What the configuration and the executor allow together."""

    max_sequences: int  # that hold a cache: each can decode in every step
    step_tokens: int
    chunk_tokens: int
    page_size: int
    total_pages: int
    request_tokens: int  # prompt and output of one completion, which must be able to run alone
    in_flight: int  # steps

    @classmethod
    def of(cls, config: CoreConfig, capacity: Capacity) -> JointLimits:
        """The smaller of each."""
        step_tokens = min(config.max_step_tokens, capacity.max_step_tokens)
        return cls(
            max_sequences=min(config.max_running, capacity.max_sequences, capacity.max_rows, step_tokens),
            step_tokens=step_tokens,
            chunk_tokens=min(config.prefill_chunk_tokens, step_tokens),
            page_size=capacity.page_size,
            total_pages=capacity.total_pages,
            request_tokens=min(capacity.context_length, capacity.total_pages * capacity.page_size),
            in_flight=min(config.max_in_flight or capacity.steps_to_be_busy, capacity.max_in_flight),
        )

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)


def victims(
    running: Items[LiveSequence], needy: LiveSequence, shortage: int, limits: JointLimits
) -> Iterator[LiveSequence]:
    """Whom to preempt for `shortage` pages: the last of `running`, which is in the order of turns, first.

    Only those behind `needy`, the first that lacks pages: those before it get on, and it can wait for
    them. What a victim gives back is an estimate (its pages may be shared), so it decides only how
    many go at once; the executor's next reply says what came free.
    """
    for sequence in reversed(running):
        if shortage <= 0 or sequence is needy:
            return
        shortage -= pages_back(sequence, limits)
        yield sequence


def pages_back(sequence: LiveSequence, limits: JointLimits) -> int:
    """Pages that preempting it brings: an estimate, at least 1."""
    return max(1, limits.pages(sequence.kv) - sequence.shared_tokens // limits.page_size)


def can_go_ahead(sequence: LiveSequence) -> bool:
    """Whether a sequence with unanswered rows gets another one, to continue from what they will sample.

    It does if their lengths are known before the answer, and it neither has its end there nor could have
    drafts. Should it turn out to have ended, the row is computed in vain.
    """
    length = len(sequence.tokens) + sequence.in_flight
    if not sequence.is_predictable or length >= sequence.end_length:
        return False
    return sequence.draft_state is None or length < sequence.draft_state.plain_until
