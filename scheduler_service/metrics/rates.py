"""The scheduler's throughput in tokens per second, which routers can use."""

from __future__ import annotations

import math

from scheduler_service.core.snapshot import Totals

HALF_LIFE_S = 3.0


class Rates:
    """Exponential moving averages of token counters, with a half-life of HALF_LIFE_S."""

    def __init__(self, now: float) -> None:
        self.prompt_tokens_per_s = 0.0  # without prefix hits
        self.completion_tokens_per_s = 0.0
        self._last = (now, 0, 0)

    def observe(self, counters: Totals, now: float) -> None:
        """Update the rates with the current counters; `now`, in seconds, never decreases."""
        then, prompt, completion = self._last
        elapsed_s = now - then
        if elapsed_s <= 0:
            return
        weight = 1 - math.exp2(-elapsed_s / HALF_LIFE_S)
        self.prompt_tokens_per_s += weight * (
            (counters.prefilled_tokens - prompt) / elapsed_s - self.prompt_tokens_per_s
        )
        self.completion_tokens_per_s += weight * (
            (counters.completion_tokens - completion) / elapsed_s - self.completion_tokens_per_s
        )
        self._last = (now, counters.prefilled_tokens, counters.completion_tokens)
