"""Drives the core against an executor in process, and holds every plan and event to the promises."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import CompletionEnded, Event, Failed, PromptScores, PromptVector, Tokens
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.request import Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import (
    CacheFork,
    CacheOpening,
    CacheRow,
    Capacity,
    PlannedStep,
    ScoredTokens,
    StepAnswer,
)
from scheduler_service.core.step_log import COLUMNS, StepLog, StepPart

CAPACITY = Capacity(
    total_pages=64, page_size=4, context_length=128, max_sequences=16, max_rows=16, max_step_tokens=64
)
STEP_S = 0.01


class Executor(Protocol):
    capacity: Capacity

    def execute(self, plan: PlannedStep) -> StepAnswer: ...

    def restart(self) -> None: ...

    def check(self) -> None: ...


def make_request(
    request_id: str,
    prompt: Iterable[int] = (1, 2, 3),
    *,
    seed: int = 7,
    max_tokens: int | None = 4,
    **other: object,
) -> Request:
    return Request(
        id=request_id,
        prompt=tuple(prompt),
        sampling=SamplingSettings(temperature=1.0, seed=seed),
        max_tokens=max_tokens,
        **other,  # type: ignore[arg-type]
    )


def parts(plan: PlannedStep) -> list[CacheRow | CacheOpening]:
    """Who is computed by it."""
    return [*plan.rows, *plan.openings]


class Harness:
    """One core, one executor, one clock. `plan`, then `answer` or `lose`; or `step` for both.

    With a `draft` executor also `plan_draft`, then `answer_draft` or `lose_draft`.
    """

    def __init__(
        self,
        executor: Executor,
        config: CoreConfig | None = None,
        *,
        connect: bool = True,
        draft: Executor | None = None,
    ) -> None:
        self.executor = executor
        self.draft = draft
        self.drafting: PlannedStep | None = None  # unanswered
        self.drafted_caches: set[int] = set()  # that the draft executor may hold
        self._last_draft_id = 0
        self.config = config or CoreConfig(max_step_tokens=32, prefill_chunk_tokens=16)
        self.core = StepScheduler(self.config)
        self.now = 0.0
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.scores: dict[tuple[str, int], list[ScoredTokens]] = {}
        self.vectors: dict[tuple[str, int], bytes] = {}
        self.finished: dict[tuple[str, int], CompletionEnded] = {}
        self.failed: dict[str, Failed] = {}
        self.requests: dict[str, Request] = {}
        self.owner: dict[int, tuple[str, int]] = {}  # of each cache that the executor may hold
        self.unanswered: deque[PlannedStep] = deque()
        self._last_cache_id = 0
        if connect:
            self.ready()
        if draft is not None:
            self.core.draft_ready(draft.capacity)

    # -- what happens ----------------------------------------------------------------------------

    def ready(self) -> None:
        self._take(self.core.executor_ready(self.executor.capacity, self.now))

    def add(self, request: Request) -> None:
        events = self.core.add(request, self.now)
        self.requests[request.id] = request
        for index in range(request.n):
            self.tokens[request.id, index] = []
        for one in request.continued:
            self.tokens[request.id, one.index] += one.ids
        self._take(events)

    def cancel(self, request_id: str) -> None:
        failed = self.core.cancel(request_id, self.now)
        if failed is not None:
            self._take([failed])

    def stop(self, request_id: str, index: int) -> None:
        finished = self.core.stop(request_id, index, self.now)
        if finished is not None:
            self._take([finished])

    def plan(self) -> PlannedStep | None:
        self._take(self.core.expire(self.now))
        plan = self.core.plan(self.now)
        if plan is not None:
            self.unanswered.append(plan)
            assert len(self.unanswered) <= JointLimits.of(self.config, self.executor.capacity).short_in_flight
            self._check(plan)
        self.core.check_integrity()
        return plan

    def answer(self, result: StepAnswer | None = None) -> list[Event]:
        """The oldest step's answer comes in; here the executor computes it only now."""
        result = result or self.executor.execute(self.unanswered[0])
        if self.executor.capacity.short_step_s:
            result.compute_s = STEP_S
        self.executor.check()
        self.unanswered.popleft()
        self.now += STEP_S
        events = self.core.apply(result, self.now)
        self._take(events)
        self.core.check_integrity()
        return events

    def step(self) -> list[Event]:
        """One step, or one tick of the clock when there is nothing to do. Drafting takes no time."""
        while self.plan_draft() is not None:
            self.answer_draft()
        while self.plan() is not None:
            pass
        if self.unanswered:
            return self.answer()
        self.now = max(self.now + STEP_S, self.core.next_wakeup(self.now) or 0.0)
        return []

    def lose(self) -> None:
        self._take(self.core.executor_lost(self.now))
        self.executor.restart()
        self.owner.clear()
        self.unanswered.clear()
        self.core.check_integrity()

    def run(self, steps: int = 1000) -> None:
        """Until nothing lives and nothing is left to release."""
        for _ in range(steps):
            self.step()
            if self.idle:
                return
        raise AssertionError(f"not idle after {steps} steps: {self.core.snapshot()}")

    @property
    def idle(self) -> bool:
        snapshot = self.core.snapshot()
        busy = snapshot.running or snapshot.waiting or snapshot.in_flight or self.owner
        return not (busy or self.drafting or self.drafted_caches)

    # -- the draft executor ----------------------------------------------------------------------

    def plan_draft(self) -> PlannedStep | None:
        """Before `plan`, as the shell does."""
        if self.draft is None:
            return None
        plan = self.core.plan_draft(self.now)
        if plan is not None:
            assert self.drafting is None, "two draft steps in flight"
            self.drafting = plan
            self._check_draft(plan)
        self.core.check_integrity()
        return plan

    def answer_draft(self, result: StepAnswer | None = None) -> None:
        assert self.draft is not None
        assert self.drafting is not None
        result = result or self.draft.execute(self.drafting)
        self.draft.check()
        self.drafting = None
        self.core.apply_draft(result, self.now)
        self.core.check_integrity()

    def lose_draft(self) -> None:
        assert self.draft is not None
        self.core.draft_lost()
        self.draft.restart()
        self.drafting = None
        self.drafted_caches.clear()
        self.core.check_integrity()

    def _check_draft(self, plan: PlannedStep) -> None:
        """The draft executor can take the plan, and each of its caches is opened and released once."""
        assert self.draft is not None
        capacity = self.draft.capacity
        for cache_id in plan.releases:
            self.drafted_caches.remove(cache_id)
        for opening in plan.openings:
            assert opening.cache_id > self._last_draft_id
            self._last_draft_id = opening.cache_id
            self.drafted_caches.add(opening.cache_id)
            assert opening.limit >= 1
        fed = [part.cache_id for part in parts(plan)]
        assert len(fed) == len(set(fed)) <= capacity.max_rows
        assert set(fed) <= self.drafted_caches
        assert {cut.cache_id for cut in plan.truncates} <= {row.cache_id for row in plan.rows}
        assert len(self.drafted_caches) <= capacity.max_sequences
        tokens = sum((len(row.tokens) or row.limit or 1) + row.steps - 1 for row in plan.rows)
        tokens += sum(opening.limit for opening in plan.openings)
        assert tokens <= JointLimits.of(self.config, capacity).step_tokens
        assert all(row.steps <= capacity.max_steps for row in plan.rows)

    # -- what is promised ------------------------------------------------------------------------

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            assert event.request_id not in self.failed, "a request that failed has another event"
            if isinstance(event, Failed):
                self.failed[event.request_id] = event
                given = {one.index: len(one.ids) for one in self.requests[event.request_id].continued}
                emitted = any(
                    len(self.tokens[event.request_id, i]) > given.get(i, 0)
                    for i in range(self._n(event.request_id))
                )
                is_evaluation = self.requests[event.request_id].evaluation is not None
                assert event.emitted == (
                    emitted or (not is_evaluation and (event.request_id, 0) in self.scores)
                )
                continue
            key = event.request_id, event.index
            assert key not in self.finished, "a completion that finished has another event"
            if isinstance(event, Tokens):
                self.tokens[key] += event.ids
            elif isinstance(event, PromptScores):
                self._take_scores(key, event.scores)
            elif isinstance(event, PromptVector):
                assert key not in self.vectors, "a second vector"
                self.vectors[key] = event.data
            else:
                self.finished[key] = event
                assert event.usage.completion_tokens == len(self.tokens[key])
                assert 0 <= event.usage.queue_s <= event.usage.first_token_s <= event.usage.total_s

    def _take_scores(self, key: tuple[str, int], scores: ScoredTokens) -> None:
        request, earlier = self.requests[key[0]], self.scores.setdefault(key, [])
        assert not self.tokens[key], "scores of the prompt behind the first token"
        evaluation = request.evaluation
        begin = 1 if evaluation is None else evaluation.inputs[key[1]].scored_from
        assert scores.first == begin + sum(len(one.logprobs) for one in earlier), "doubled, or a gap"
        assert scores.logprobs
        assert len(scores.top_ids) == len(scores.top_logprobs) == scores.k * len(scores.logprobs)
        assert scores.k == (request.prompt_logprobs or 0)
        earlier.append(scores)

    def logprobs(self, key: tuple[str, int]) -> list[float]:
        """Of the prompt's tokens, so far."""
        return [logprob for scores in self.scores.get(key, []) for logprob in scores.logprobs]

    def _n(self, request_id: str) -> int:
        return self.requests[request_id].n

    def ended(self, key: tuple[str, int]) -> bool:
        return key in self.finished or key[0] in self.failed

    def _check(self, plan: PlannedStep) -> None:
        """The plan is one the executor can take, and has nobody who has ended."""
        capacity = self.executor.capacity
        for cache_id in plan.releases:
            del self.owner[cache_id]  # every cache that was opened is released once
        if len(self.unanswered) > 1:
            self._check_ahead()
        opened: list[CacheFork | CacheOpening] = [*plan.forks, *plan.openings]
        for cache_id in sorted(part.cache_id for part in opened):
            assert cache_id > self._last_cache_id, "cache ids rise and are never used again"
            self._last_cache_id = cache_id
        fed = [part.cache_id for part in parts(plan)]
        assert len(fed) == len(set(fed)) <= capacity.max_rows, "one row per cache"
        for fork in plan.forks:
            self.owner[fork.cache_id] = self._who(fork.cache_id)
            assert fork.source_id in self.owner
        for opening in plan.openings:
            self.owner[opening.cache_id] = self._who(opening.cache_id)
            assert opening.limit >= 1
        assert len(self.owner) <= min(capacity.max_sequences, self.config.max_running)
        adapters = {self.requests[who].adapter for who, _ in self.owner.values()} - {b""}
        assert len(adapters) <= capacity.max_adapter_slots, "more adapters than slots"
        for cache_id in fed:
            assert not self.ended(self.owner[cache_id]), "a step contains one who has ended"
        budget = JointLimits.of(self.config, capacity).step_tokens
        tokens = sum((row.limit or 1) + len(row.drafts) for row in plan.rows)
        tokens += sum(opening.limit for opening in plan.openings)
        assert all(len(row.drafts) <= capacity.max_drafts for row in plan.rows)
        assert tokens <= budget, f"{tokens} tokens in a step of {budget}: {plan}"

    def _check_ahead(self) -> None:
        """Who has a row in an unanswered step gets another only if it is sure where that leads at most."""
        before: dict[int, CacheRow | CacheOpening] = {}
        unsure: set[int] = set()  # has unanswered drafts
        for plan in self.unanswered:
            for part in parts(plan):
                former = before.get(part.cache_id)
                if former is not None:
                    assert isinstance(part, CacheRow)
                    assert isinstance(former, CacheRow)
                    assert not former.limit
                    assert not former.tokens
                    most = former.kv_length + 1 + len(former.drafts)
                    # Meanwhile answers may have shown that the former row's own bound is too high.
                    assert part.kv_length <= most if former.is_bound else part.kv_length == most
                    assert part.is_bound >= (part.cache_id in unsure)
                before[part.cache_id] = part
                if isinstance(part, CacheRow) and part.drafts:
                    unsure.add(part.cache_id)

    def _who(self, cache_id: int) -> tuple[str, int]:
        for sequence in self.core._pool.running:
            if sequence.cache_id == cache_id:
                return sequence.live.request.id, sequence.index
        raise AssertionError(f"nobody holds cache {cache_id}")


def log_parts(log: StepLog, first: int = 1, most: int = 10_000) -> list[StepPart]:
    """All of the log from a step on."""
    found = []
    while (part := log.read(first, most)) is not None:
        found.append(part)
        first = part.first_step + len(part)
    return found


def column(log: StepLog, name: str) -> list[int]:
    """A figure of each step."""
    return [figure for part in log_parts(log) for figure in part.columns[COLUMNS.index(name)]]


def check_log(core: StepScheduler) -> None:
    """Its columns add up to the counters."""
    log, counters = core.log, core.snapshot().counters
    assert len(log) == counters.steps
    rows = sum(sum(column(log, kind)) for kind in ("prompt_rows", "decode_rows", "verify_rows"))
    assert rows == counters.rows
    assert sum(column(log, "accepted_tokens")) == counters.accepted_tokens
    assert sum(column(log, "event_counts")) == sum(len(part.events.kinds) for part in log_parts(log))


def solo(executor: Executor, request: Request) -> dict[int, list[int]]:
    """The request's completions when nobody else is there."""
    harness = Harness(executor)
    harness.add(request)
    harness.run()
    return {index: harness.tokens[request.id, index] for index in range(request.n)}
