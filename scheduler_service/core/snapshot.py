"""What the core counts, for metrics and GetStatus."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """Totals since the start. They only rise."""

    requests: int = 0  # taken
    refused: int = 0  # before they were queued
    finished: int = 0  # requests of which every completion finished
    cancelled: int = 0
    failed: int = 0  # cancelled ones not counted
    preemptions: int = 0  # of sequences; executor losses not counted
    executor_losses: int = 0
    steps: int = 0  # answered
    rows: int = 0  # answered, openings included
    prompt_tokens: int = 0  # of requests taken
    cached_tokens: int = 0  # found in the prefix cache
    prefilled_tokens: int = 0  # known tokens that were computed to fill a cache
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0  # answered rows that had drafts
    predicted_wait_s: float = 0.0  # until started, of requests that were started: as predicted when they came
    wait_s: float = 0.0  # the same, as it was


@dataclass(frozen=True, slots=True)
class Share:
    """What one identity has and had; totals since its account is known."""

    identity: str
    requests: int  # taken
    refused: int
    tokens: int  # virtual: uncached prompt tokens, and output tokens twice
    running: int  # sequences
    queued: int  # requests not started


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Live figures; `counters` is a copy."""

    executor: bool  # one is connected
    running: int  # sequences that hold a cache
    waiting: int  # sequences that hold none
    waiting_tokens: int  # their known tokens
    uncomputed_tokens: int  # known tokens of all sequences that are not computed yet
    page_size: int  # tokens
    max_sequences: int  # that can run at once
    in_flight: int  # steps
    total_pages: int
    free_pages: int  # from the last reply; evictable ones not counted
    evictable_pages: int
    step_s: float  # moving average, plan to apply; 0 before the first step
    step_rows: float  # moving average
    draft_executor: bool = False  # one is connected
    draft_step_s: float = 0.0  # moving average of a draft executor's step; 0 before the first
    counters: Totals = field(default_factory=Totals)
