"""The real core under load, on a virtual clock: executors that only take time, clients that only ask.

A step takes `StepCost.seconds` of what it computes. A request ends with its eos token after as many tokens
as its client says, which the core does not know. Nothing is random but the arrivals, from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import NoRoom
from scheduler_service.core.events import CompletionEnded, Event, Failed, Tokens
from scheduler_service.core.request import Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import Capacity, PlannedStep, RowAnswer, StepAnswer

EOS = 2


@dataclass(frozen=True)
class StepCost:
    """A step takes `base_s`, and `token_s` for each token that it feeds."""

    base_s: float = 0.02
    token_s: float = 2e-4

    def seconds(self, tokens: int) -> float:
        return self.base_s + self.token_s * tokens


@dataclass
class Call:
    """One request, and what became of it. Times are those of the virtual clock; None: it did not happen."""

    at: float
    length: int  # output tokens
    prompt: int = 16
    timeout_s: float | None = None
    identity: str = ""
    weight: float = 1.0
    priority: int = 0
    max_tokens: int | None = 4096
    first_token_at: float | None = None
    finished_at: float | None = None
    failed_at: float | None = None
    refused: NoRoom | None = None

    @property
    def first_token_s(self) -> float:
        assert self.first_token_at is not None, f"no first token: {self}"
        return self.first_token_at - self.at


@dataclass
class _Cache:
    number: int
    prompt: int
    known: int
    kv: int = 0


@dataclass
class Simulation:
    """Run `calls` to their ends; `follow` may return a client's next call when one of its calls has ended."""

    cost: StepCost = field(default_factory=StepCost)
    places: int = 64
    config: CoreConfig = field(default_factory=lambda: CoreConfig(max_running=64))
    pages: int = 1 << 16
    page_size: int = 16

    def __post_init__(self) -> None:
        self.core = StepScheduler(self.config)
        capacity = Capacity(self.pages, self.page_size, 1 << 20, self.places, self.places, 1 << 16)
        self.core.executor_ready(capacity, 0.0)
        self.calls: list[Call] = []
        self.now = 0.0
        self._caches: dict[int, _Cache] = {}
        self._arrivals: list[tuple[float, int, Call]] = []
        self._free = self.pages

    def run(self, calls: Iterable[Call], until: float = float("inf")) -> list[Call]:
        """All calls, in the order of arrival; those that have not ended by `until` stay as they are."""
        self._arrivals = [(call.at, number, call) for number, call in enumerate(calls)]
        heapify(self._arrivals)
        while self.now < until:
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self._arrive(heappop(self._arrivals)[2])
            self._take(self.core.expire(self.now))
            plan = self.core.plan(self.now)
            if plan is not None:
                result, tokens = self._execute(plan)
                self.now += self.cost.seconds(tokens) if tokens else 0.0
                self._take(self.core.apply(result, self.now))
                continue
            times = [at for at, _, _ in self._arrivals[:1]]
            if (wakeup := self.core.next_wakeup(self.now)) is not None:
                times.append(max(wakeup, self.now + 1e-4))
            if not times:
                break
            self.now = max(self.now, min(times))
        return self.calls

    def follow(self, call: Call) -> Call | None:
        """A closed-loop client's next call; by default there is none."""
        return None

    def _arrive(self, call: Call) -> None:
        number = len(self.calls)
        self.calls.append(call)
        request = Request(
            str(number),
            (7,) * call.prompt,
            SamplingSettings(seed=number),
            max_tokens=call.max_tokens,
            eos_token_ids=frozenset({EOS}),
            arrival=call.at,
            deadline=None if call.timeout_s is None else call.at + call.timeout_s,
            identity=call.identity,
            weight=call.weight,
            priority=call.priority,
        )
        try:
            self.core.add(request, self.now)
        except NoRoom as refused:
            call.refused = refused
            self._end(call)

    def _end(self, call: Call) -> None:
        if (following := self.follow(call)) is not None:
            heappush(self._arrivals, (following.at, len(self.calls) + len(self._arrivals), following))

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            call = self.calls[int(event.request_id)]
            if isinstance(event, Tokens):
                call.first_token_at = call.first_token_at or self.now
            elif isinstance(event, CompletionEnded):
                call.finished_at = self.now
                self._end(call)
            elif isinstance(event, Failed):
                call.failed_at = self.now
                self._end(call)

    def _execute(self, plan: PlannedStep) -> tuple[StepAnswer, int]:
        for cache_id in plan.releases:
            if cache_id in self._caches:
                self._free += self._held(self._caches.pop(cache_id))
        answers, tokens = [], 0
        for row in plan.rows:
            tokens += row.limit or 1
            answers.append(self._feed(self._caches[row.cache_id], row.limit))
        for opening in plan.openings:
            tokens += opening.limit
            cache = _Cache(opening.sampling.seed, opening.prompt_length, len(opening.tokens))
            self._caches[opening.cache_id] = cache
            answers.append(self._feed(cache, opening.limit))
        assert self._free >= 0, "more pages than there are"
        return StepAnswer(plan.number, answers, [], self._free, 0), tokens

    def _held(self, cache: _Cache) -> int:
        return -(-cache.kv // self.page_size)

    def _feed(self, cache: _Cache, limit: int) -> RowAnswer:
        before = self._held(cache)
        cache.kv = min(cache.known, cache.kv + (limit or cache.known))
        self._free -= self._held(cache) - before
        if cache.kv < cache.known:
            return RowAnswer(cache.kv)
        cache.known += 1
        ends = cache.known - cache.prompt >= self.calls[cache.number].length
        return RowAnswer(cache.kv, [EOS if ends else 5])


def poisson(rate: float, until: float, seed: int, **fields: object) -> Iterator[Call]:
    """Calls of an open-loop client: so many a second, whatever becomes of them."""
    rng, at = random.Random(seed), 0.0
    while (at := at + rng.expovariate(rate)) < until:
        yield Call(at=at, **fields)  # type: ignore[arg-type]


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def with_lengths(calls: Iterable[Call], lengths: Iterable[int]) -> Iterator[Call]:
    """The same calls with these lengths, in turn."""
    for call, length in zip(calls, lengths, strict=False):
        yield replace(call, length=length)
