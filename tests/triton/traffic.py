"""The real core in front of a device that is a clock: which steps a GPU is asked for under chat traffic.

64 clients talk in turns. Where a client goes on with its conversation, all pages of what was said before are
in the prefix cache; else it begins another one. Two steps are in flight, as with a GPU, and a step takes what
an 8B model in bf16 is expected to take on an H100. The model's outputs are written beforehand: so the
executor knows which drafts are right, and a run is the same every time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from math import log

import numpy as np

from executor_service.backends.torch_backend.ops.row_tensors import Ints
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import CompletionEnded, Event
from scheduler_service.core.request import DraftingWish, DraftSource, Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import CacheOpening, CacheRow, Capacity, PlannedStep, RowAnswer, StepAnswer

PAGES, PAGE, CONTEXT = 25_000, 16, 40_960
_EOS, _FIRST_WORD = 2, 10
_GOES_ON, _COPIES, _PAUSE_S = 0.6, 0.25, 1.0


@dataclass(frozen=True)
class StepRows:
    """The rows of one step: int32 [rows] each."""

    starts: Ints
    counts: Ints
    outputs: Ints


@dataclass
class _Turn:
    """What a client asks, and what it will be answered, from `asked` on."""

    client: int
    text: list[int]
    asked: int
    known_before: int = 0  # tokens of the conversation whose pages are cached


@dataclass
class _Cache:
    turn: _Turn
    kv: int
    known: int


@dataclass
class Traffic:
    """`steps` yields the rows of each step that the device computes."""

    speculation: bool
    clients: int = 64
    prompt: int = 300  # tokens of the first one of a conversation, median
    seed: int = 1
    _now: float = 0.0
    _turns: list[_Turn] = field(default_factory=list)
    _caches: dict[int, _Cache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._core = StepScheduler(CoreConfig())
        gpu = Capacity(PAGES, PAGE, CONTEXT, 256, 256, 8192, steps_to_be_busy=2, tokens_to_be_busy=2048)
        self._core.executor_ready(gpu, 0.0)
        self._arrivals = [(self._rng.expovariate(1 / 3), client) for client in range(self.clients)]
        self._arrivals.sort()
        self._conversations: list[list[int]] = [[] for _ in range(self.clients)]

    def steps(self, count: int) -> Iterator[StepRows]:
        """The rows of so many steps."""
        return islice(self._run(), count)

    def _run(self) -> Iterator[StepRows]:
        pending: deque[tuple[float, float, StepAnswer]] = deque()  # when it is done, how long it takes
        while True:
            while self._arrivals and self._arrivals[0][0] <= self._now:
                self._ask(heappop(self._arrivals)[1])
            plan = self._core.plan(self._now) if len(pending) < 2 else None
            if plan is not None:
                rows, answer = self._compute(plan)
                seconds = seconds_of(rows) if rows is not None else 0.0
                begins = max(self._now, pending[-1][0]) if pending else self._now
                answer.compute_s = seconds
                pending.append((begins + seconds, seconds, answer))
                if rows is not None:
                    yield rows
            elif pending:
                done, _, answer = pending.popleft()
                self._now = max(self._now, done)
                self._take(self._core.apply(answer, self._now))
            else:
                self._now = max(self._now, self._arrivals[0][0])

    def _ask(self, client: int) -> None:
        said, rng = self._conversations[client], self._rng
        if not said or rng.random() > _GOES_ON or len(said) > CONTEXT // 2:
            said = []
            asked = self._words(
                min(max(int(rng.lognormvariate(log(self.prompt), 0.8)), 20), 13 * self.prompt)
            )
        else:
            asked = self._words(rng.randint(10, 150))
        prompt = said + asked
        length = min(max(int(rng.expovariate(1 / 200)), 8), 2000)
        if rng.random() < _COPIES:  # it says again what is in the prompt, with one word in 30 changed
            source = (prompt * (length // len(prompt) + 1))[:length]
            answer = [word if rng.random() > 1 / 30 else self._words(1)[0] for word in source]
        else:
            answer = self._words(length)
        turn = _Turn(client, [*prompt, *answer, _EOS], len(prompt), len(said))
        number = len(self._turns)
        self._turns.append(turn)
        drafters = frozenset({DraftSource.NGRAM} if self.speculation else ())
        request = Request(
            str(number),
            tuple(prompt),
            SamplingSettings(seed=number),
            eos_token_ids=frozenset({_EOS}),
            arrival=self._now,
            speculation=DraftingWish(drafters),
        )
        self._core.add(request, self._now)

    def _words(self, count: int) -> list[int]:
        """As often as in prose (Zipf), in no order."""
        return [_FIRST_WORD + int(1.0004 ** self._rng.randrange(24_000)) for _ in range(count)]

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, CompletionEnded):
                turn = self._turns[int(event.request_id)]
                self._conversations[turn.client] = turn.text[:-1]
                heappush(self._arrivals, (self._now + self._rng.expovariate(1 / _PAUSE_S), turn.client))

    def _compute(self, plan: PlannedStep) -> tuple[StepRows | None, StepAnswer]:
        for cache_id in plan.releases:
            self._caches.pop(cache_id, None)
        fed: list[tuple[int, int, int]] = []
        answers = [self._continue(row, fed) for row in plan.rows]
        answers += [self._open(opening, fed) for opening in plan.openings]
        free = PAGES - sum(-(-cache.kv // PAGE) for cache in self._caches.values())
        answer = StepAnswer(plan.number, answers, [], free, 0)
        if not fed:
            return None, answer
        starts, counts, outputs = np.array(fed, np.int32).T
        return StepRows(starts, np.ascontiguousarray(counts), outputs), answer

    def _open(self, opening: CacheOpening, fed: list[tuple[int, int, int]]) -> RowAnswer:
        turn = self._turns[opening.sampling.seed]
        hit = min(turn.known_before, len(opening.tokens) - 1) // PAGE * PAGE
        cache = self._caches[opening.cache_id] = _Cache(turn, hit, len(opening.tokens))
        answer = self._feed(cache, opening.limit, (), fed)
        answer.cached_length = hit
        return answer

    def _continue(self, row: CacheRow, fed: list[tuple[int, int, int]]) -> RowAnswer:
        return self._feed(self._caches[row.cache_id], row.limit, row.drafts, fed)

    def _feed(
        self, cache: _Cache, limit: int, drafts: tuple[int, ...], fed: list[tuple[int, int, int]]
    ) -> RowAnswer:
        start, text = cache.kv, cache.turn.text
        count = min(limit or cache.known, cache.known - start)
        if start + count < cache.known:
            cache.kv += count
            fed.append((start, count, 0))
            return RowAnswer(cache.kv)
        fed.append((start, count + len(drafts), 1 + len(drafts)))
        said = text[cache.known : cache.known + 1 + len(drafts)] or [
            _EOS
        ]  # a row after the end is for nothing
        accepted = 0
        while accepted < min(len(drafts), len(said) - 1) and drafts[accepted] == said[accepted]:
            accepted += 1
        cache.kv += count + accepted
        cache.known += 1 + accepted
        return RowAnswer(cache.kv, said[: accepted + 1])


def seconds_of(rows: StepRows) -> float:
    """15.1 GB and 147,456 bytes a key at 3 TB/s, or 2 x 8.2e9 operations a token at 790 TFLOP/s."""
    keys, tokens = int((rows.starts + rows.counts).sum()), int(rows.counts.sum())
    return 1.2 * max((15.1e9 + 147_456 * keys) / 3e12, 2 * 8.2e9 * tokens / 790e12) + 4e-4
