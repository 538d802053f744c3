"""The limits that hold for every plan: the smaller ones of the scheduler and of its executor."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.core.config import CoreConfig
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
