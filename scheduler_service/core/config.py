"""What the core is told once: budgets, bounds and timeouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Checked when made. Lengths are tokens, times seconds; the executor's own limits also hold."""

    max_step_tokens: int = 512  # fed in one step, all rows together
    prefill_chunk_tokens: int = 256  # most of one prompt in one step
    max_running: int = 256  # sequences that hold a cache
    max_queued_requests: int = 1024  # waiting, not yet started; shared by the identities that wait
    max_queued_requests_per_identity: int = 0  # of one of them at most; 0: its share of them all
    max_queued_tokens: int = 1 << 20  # prompt tokens of those
    failover_timeout_s: float = 60.0  # how long a request waits for an executor
    max_in_flight: int = 0  # steps sent and not answered; 0: as many as keep the executor busy
    max_draft_tokens: int = 8  # most drafts of one row whose length the controller decides
    max_refusals: int = 3  # stale-view answers in a row before a sequence is given up

    def __post_init__(self) -> None:
        for name in (
            "max_step_tokens",
            "prefill_chunk_tokens",
            "max_running",
            "max_queued_requests",
            "max_queued_tokens",
            "max_draft_tokens",
            "max_refusals",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("max_in_flight", "max_queued_requests_per_identity"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0")
        if not self.failover_timeout_s >= 0:
            raise ValueError("failover_timeout_s must be at least 0")
