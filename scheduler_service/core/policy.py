"""Pure functions: joint limits, which sequences are preempted, which may have rows before an answer."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.step import Capacity


@dataclass(frozen=True, slots=True)
class JointLimits:
    """The smaller of the configuration's and the executor's limits."""

    max_sequences: int  # that hold a cache: each can decode in every step
    step_tokens: int
    chunk_tokens: int
    page_size: int
    total_pages: int
    request_tokens: int  # prompt and output of one completion, which must be able to run alone
    in_flight: int  # steps
    short_in_flight: int  # steps shorter than `short_step_s`
    short_step_s: float
    adapter_slots: int  # adapters that sequences with a cache have at once
    output_bytes: int  # of a step's scores and vectors
    vector_bytes: int
    step_budget_s: float = 0.0  # of a step with prompts beside sequences that decode; 0: prompt_budget.py

    @classmethod
    def of(cls, config: CoreConfig, capacity: Capacity) -> JointLimits:
        """The limits that hold while this executor is connected."""
        busy, steps = capacity.tokens_to_be_busy, capacity.steps_to_be_busy
        step_tokens = min(config.max_step_tokens or busy, capacity.max_step_tokens)
        return cls(
            max_sequences=min(config.max_running, capacity.max_sequences, capacity.max_rows, step_tokens),
            step_tokens=step_tokens,
            chunk_tokens=min(config.prefill_chunk_tokens or max(busy // 2, 1), step_tokens),
            page_size=capacity.page_size,
            total_pages=capacity.total_pages,
            request_tokens=min(capacity.context_length, capacity.total_pages * capacity.page_size),
            in_flight=min(config.max_in_flight or steps, capacity.max_in_flight),
            short_in_flight=min(config.max_in_flight or steps + 1, capacity.max_in_flight),
            short_step_s=capacity.short_step_s,
            adapter_slots=capacity.max_adapter_slots,
            output_bytes=capacity.max_output_bytes,
            vector_bytes=4 * capacity.hidden_size,
            step_budget_s=config.step_budget_s,
        )

    def steps(self, step_s: float) -> int:
        """How many steps may be in flight if one takes `step_s` seconds on the device; 0: not known yet."""
        return self.short_in_flight if 0 < step_s < self.short_step_s else self.in_flight

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)


def victims(
    running: Items[LiveSequence], needy: LiveSequence, shortage: int, limits: JointLimits
) -> Iterator[LiveSequence]:
    """The sequences to preempt for `shortage` pages, from the end of `running`, which is in order of turns.

    needy: the first sequence that lacks pages. Only those after it are preempted; those before it make
    progress, and it can wait for them. The pages that a preemption frees are an estimate, since they may be
    shared: it only decides how many sequences are preempted at once.
    """
    for sequence in reversed(running):
        if shortage <= 0 or sequence is needy:
            return
        shortage -= pages_back(sequence, limits)
        yield sequence


def pages_back(sequence: LiveSequence, limits: JointLimits) -> int:
    """Estimate of the pages that preempting the sequence frees, at least 1."""
    return max(1, limits.pages(sequence.kv) - sequence.shared_tokens // limits.page_size)


def can_go_ahead(sequence: LiveSequence) -> bool:
    """Whether a sequence with unanswered rows may get another row, which continues from their tokens.

    It may if each unanswered row decodes or verifies, the sequence is shorter than its end length even if all
    their drafts are accepted, and no decision about drafts is due (`plain_until`) that needs their answers
    (`ahead_at`). If a sampled token ends the sequence, the further row is computed in vain.
    """
    if not sequence.is_predictable:
        return False
    length = len(sequence.tokens) + sequence.ahead
    if length >= sequence.end_length:
        return False
    state = sequence.draft_state
    return state is None or length < state.plain_until or length == state.ahead_at
