"""What the core counts, for metrics and GetStatus."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_service.core.waiting.reasons import WaitTimes


@dataclass(slots=True)
class Totals:
    """Totals since the start. They only rise."""

    requests: int = 0  # taken
    refused: int = 0  # requests that were not taken
    finished: int = 0  # requests of which the last completion finished
    cancelled: int = 0  # requests
    failed: int = 0  # requests; cancelled ones not counted
    preemptions: int = 0  # of sequences; executor losses not counted
    executor_losses: int = 0
    steps: int = 0  # answered
    rows: int = 0  # answered, openings included
    prompt_tokens: int = 0  # of requests that were taken
    cached_tokens: int = 0  # of these, found in the prefix cache at the first opening of the request
    prefilled_tokens: int = 0  # known tokens that were computed by openings and chunks
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verifications: int = 0  # answered rows that had drafts
    grammar_drafted_tokens: int = 0  # of drafted_tokens: forced by a grammar
    grammar_accepted_tokens: int = 0  # of accepted_tokens: the same
    predicted_wait_s: float = 0.0  # of started requests: the waits that were predicted at their adding
    wait_s: float = 0.0  # of the same requests: the actual waits


@dataclass(frozen=True, slots=True)
class Share:
    """Figures of one identity; totals since its account was made."""

    identity: str
    requests: int  # taken
    refused: int
    tokens: int  # virtual: uncached prompt tokens plus twice the output tokens
    running: int  # sequences
    queued: int  # requests not started


@dataclass(slots=True)
class AdapterUse:
    """Sequences of live requests with one adapter."""

    running: int = 0  # with a cache
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Live figures; `counters` is a copy."""

    executor: bool  # one is connected
    running: int  # sequences with a cache
    waiting: int  # sequences without a cache: queued, or held until the first completion is prefilled
    waiting_tokens: int  # known tokens of these
    uncomputed_tokens: int  # known tokens of all sequences that are not in a cache yet
    page_size: int  # tokens
    max_sequences: int  # that can run at once
    in_flight: int  # steps
    total_pages: int
    free_pages: int  # as of the last reply; evictable ones not counted
    evictable_pages: int
    step_s: float  # moving average, plan to apply; 0 before the first step
    step_rows: float  # moving average
    draft_executor: bool = False  # one is connected
    draft_step_s: float = 0.0  # moving average of a draft executor's step; 0 before the first
    counters: Totals = field(default_factory=Totals)
    waits: WaitTimes = ()  # of all requests since the start, as far as they are attributed
