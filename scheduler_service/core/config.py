"""The core's configuration: budgets, bounds and timeouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Checked when made; raises ValueError. The executor's own limits hold as well."""

    max_step_tokens: int = 0  # tokens fed in one step, by all rows together; 0: what keeps the executor busy
    prefill_chunk_tokens: int = 0  # tokens of one prompt in one step; 0: half of what keeps the executor busy
    step_budget_s: float = 0.0  # of a step with prompts beside sequences that decode; 0: see prompt_budget.py
    max_running: int = 256  # sequences with a cache
    max_queued_requests: int = 1024  # not started; shared by the identities that have some
    max_queued_requests_per_identity: int = 0  # 0: an identity's share of max_queued_requests
    max_queued_tokens: int = 1 << 20  # prompt tokens of the queued requests
    failover_timeout_s: float = 60.0  # seconds that a request waits while no executor opens caches
    watchdog_s: float = 30.0  # without an admission, until the watchdog looks whether that is right; 0: never
    release_wait_s: float = 0.0  # that releases wait for a step with rows, while nothing is queued
    max_in_flight: int = 0  # steps sent and not answered; 0: as many as keep the executor busy
    max_draft_tokens: int = 8  # drafts of one row, where the controller decides on their number
    max_refusals: int = 3  # answers in a row that a sequence's cache is not as recorded, until it fails

    def __post_init__(self) -> None:
        for name in (
            "max_running",
            "max_queued_requests",
            "max_queued_tokens",
            "max_draft_tokens",
            "max_refusals",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in (
            "max_step_tokens",
            "prefill_chunk_tokens",
            "max_in_flight",
            "max_queued_requests_per_identity",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")
        for name in ("failover_timeout_s", "step_budget_s", "watchdog_s", "release_wait_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0")
