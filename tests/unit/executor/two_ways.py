"""Random plans for two engines: one that does a step after another, and one that has two under way.

The first is given all rows as objects, the second those that only decode by columns, as the service is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from executor_service.backends.base import Backend
from executor_service.contract.limits import Limits
from executor_service.contract.plan import (
    Fork,
    Op,
    Opening,
    OutputMode,
    PoolingKind,
    Reason,
    Refusal,
    Release,
    RequestRefused,
    Row,
    Sampling,
    StepPlan,
    StepResult,
    Truncate,
)
from tests.support.engine_steps import BegunStep, begin, execute, planned
from tests.unit.executor.deferred import DeferredBackend
from tests.unit.executor.fakes import EMPTY, VOCAB, FakeBackend, continuation, ids
from tests.unit.executor.harness import Harness
from tests.unit.executor.table_grammar import TableGrammar, loops

# One grammar has ends and one has a place where nothing is allowed.
WORDS = loops(end=0, vocabulary=VOCAB)
STUCK = TableGrammar({0: {10: 0, 11: 0, 12: 1}, 1: {13: 2}}, ends=set(), vocabulary=VOCAB)
SAMPLINGS = (
    Sampling(), Sampling(logprobs=0), Sampling(seed=3),
    Sampling(grammar=WORDS), Sampling(seed=1, grammar=STUCK),
)  # fmt: skip
POISON = frozenset(range(0, 90, 15))  # one in fifteen of what is sampled
SEEDS = st.integers(0, 2**32 - 1)
PREFIXES = ([1] * 8, [1] * 4 + [2] * 9, [3] * 13, [4, 5])


Continuation = Callable[[list[int], int, int], list[int]]
"""The likely next tokens of a sequence: of known ones, how many, and the seed."""


class Client:
    """Makes plans as one who has not seen the last answers: lengths are the expected ones, or wrong."""

    def __init__(self, random: Random, serial: Harness, continues: Continuation, *, share: bool) -> None:
        self.random, self.serial, self.continues, self.share = random, serial, continues, share
        self.session = serial.engine.store.sessions.get(0)
        self.foreseen: dict[int, int] = {}
        self.bounds: dict[int, int] = {}  # lengths after the last plan if all drafts are accepted
        self.next_id = 1
        self.adapters: tuple[bytes, ...] = ()  # to choose from
        self.asks_of_prompts = False  # scores and vectors
        self.failed: list[int] = []
        self.odd = random.choice((2, 5, 25))  # percent of the rows, and of the steps that have ops
        self.drafts = random.choice((0, 60, 60))  # percent of the rows, besides odd ones

    def likely(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def plan(self) -> StepPlan:
        ops = tuple(self.op() for _ in range(self.random.choice((1, 1, 2)) if self.likely(self.odd) else 0))
        if self.failed and self.likely(60):
            ops = (*ops, Release(tuple(self.failed)))
            self.failed = []
        rows = [self.row(cache_id) for cache_id in sorted(self.session.caches) if self.likely(70)]
        if self.likely(1):
            rows.append(self.row(self.random.randrange(1, self.next_id + 1)))
        openings = [self.opening() for _ in range(0 if self.session.caches and self.likely(85) else 2)]
        return StepPlan(ops=ops, rows=planned(rows), openings=tuple(openings))

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """Remember whom to release."""
        for item, row in zip((*plan.rows, *plan.openings), result.rows, strict=True):
            if row.refusal is not None and row.refusal.reason is Reason.NOT_FINITE:
                assert not isinstance(item, Refusal)
                self.failed.append(item.cache_id)

    def some(self) -> int:
        live = sorted(self.session.caches)
        return self.random.choice(live) if live and self.likely(95) else self.random.randrange(1, 9)

    def op(self) -> Op:
        if self.likely(70):
            return Release(tuple(self.some() for _ in range(self.random.choice((1, 1, 2)))))
        cache_id = self.some()
        sequence = self.session.caches.get(cache_id)
        length = self.random.randint(0, sequence.length if sequence else 3)
        if self.likely(50):
            return Truncate(cache_id, length)
        return Fork(cache_id, self.new_id(), length, self.sampling())

    def sampling(self) -> Sampling:
        sampling = self.random.choice(SAMPLINGS)
        return replace(sampling, presence_penalty=0.5) if self.likely(self.odd) else sampling

    def new_id(self) -> int:
        if self.likely(95):
            self.next_id += 1
        return self.next_id

    def row(self, cache_id: int) -> Row:
        sequence = self.session.caches.get(cache_id)
        length = self.foreseen.get(cache_id, sequence.length if sequence else 0)
        if sequence and self.likely(90):
            length = sequence.length
        item = Row(cache_id, length + self.likely(self.odd) * self.likely(20), EMPTY, EMPTY)
        odd = {kind for kind in range(5) if self.likely(25)} if self.likely(self.odd) else set()
        if self.likely(self.drafts):
            odd.add(0)
        if sequence and 0 in odd:
            known = sequence.ids[: sequence.known].tolist()
            right = self.continues(known, 3, sequence.sampling.seed)[: self.random.randrange(4)]
            item.drafts = ids(*right, *[95] * self.random.choice((0, 0, 1, 2, 7)))
        if odd & {0, 1, 3} == {1}:  # the codec refuses the others
            item.steps = self.random.randint(2, 4)
        if 2 in odd:
            item.tokens = ids(*(self.random.randint(1, 2) for _ in range(self.random.randint(1, 5))))
        if 3 in odd:
            item.output = self.random.choice((OutputMode.NONE, OutputMode.TOP_K, OutputMode.FULL))
            item.top_k = 2 * (item.output is OutputMode.TOP_K)
        if 4 in odd:
            item.limit = self.random.randint(1, 3)
        if self.asks_of_prompts and not odd & {0, 1} and self.likely(30):
            item.output = OutputMode.HIDDEN
        bound = self.bounds.get(cache_id, 0)
        if sequence and sequence.length <= bound and cache_id not in self.failed and self.likely(80):
            if not len(item.tokens):
                item.kv_length, item.is_bound = max(bound, item.kv_length), True
            length = bound
        self.foreseen[cache_id] = length + 1
        self.bounds[cache_id] = length + 1 + len(item.drafts)
        return item

    def opening(self) -> Opening:
        cache_id = self.new_id()
        prompt = self.random.choice(PREFIXES)
        prompt = prompt[: self.random.randint(1, len(prompt))] + [6] * self.random.randrange(6)
        limit = self.random.choice((0, 0, 2, 5))
        output = OutputMode.NONE if self.likely(5) else OutputMode.SAMPLE
        salt = self.random.choice((b"", b"", b"s")) if self.share else b"%d" % cache_id
        tokens = np.array(prompt, np.int32)
        adapter = self.random.choice(self.adapters) if self.adapters else b""
        made = Opening(
            cache_id, tokens, len(prompt), limit, self.sampling(), output, 0, salt, adapter=adapter
        )
        return self.asking(made) if self.asks_of_prompts else made

    def asking(self, opening: Opening) -> Opening:
        """The opening, which may also ask for scores or a vector of its prompt."""
        if self.likely(40):
            pooling = self.random.choice(tuple(PoolingKind))
            opening = replace(opening, output=OutputMode.HIDDEN, pooling=pooling)
        if len(opening.tokens) > 1 and self.likely(40):
            opening = replace(opening, scored_from=self.random.randrange(1, len(opening.tokens)))
        return opening


def assert_same(
    ours: StepResult | RequestRefused, theirs: StepResult | RequestRefused, *, exact: bool
) -> None:
    """Both are the same to the client; with exact, so are the free pages."""
    assert seen(ours, exact=exact) == seen(theirs, exact=exact)


def seen(result: StepResult | RequestRefused, *, exact: bool) -> Any:
    """What the client sees, but for times."""
    if isinstance(result, RequestRefused):
        return result.refusal
    rows = []
    for row in result.rows:
        arrays = (row.logprobs, row.top_ids, row.top_logprobs, row.logits)
        rows.append(
            (
                row.kv_length,
                row.cached_length,
                row.tokens,
                [None if array is None else array.tolist() for array in arrays],
                row.refusal,
                repr(row.scores),
                repr(row.hidden),
            )
        )
    pages = (result.free_pages, result.evictable_pages) if exact else None
    return result.ops, rows, pages


def counted(harness: Harness) -> tuple[object, ...]:
    counters, cache = harness.engine.counters, harness.engine.store.pages
    undisturbed = replace(counters, compute_s=0.0, prefill_s=0.0, decode_s=0.0, steps_abandoned=0)
    return undisturbed, cache.query_tokens, cache.hit_tokens, harness.engine.store.count


def of_objects(plan: StepPlan) -> StepPlan:
    """The same plan with no row by columns: each has an array of tokens of its own, if an empty one."""
    rows = [replace(row, tokens=row.tokens.copy()) if isinstance(row, Row) else row for row in plan.rows]
    return replace(plan, rows=planned(rows))


class TwoWays:
    """One engine that does one step after another, and one that has two under way."""

    def __init__(
        self,
        seed: int,
        bounds: Limits,
        poison: frozenset[int] = frozenset(),
        *,
        share: bool = True,
        backends: tuple[Backend, Backend] | None = None,
        continues: Continuation = continuation,
        compare: Callable[..., None] = assert_same,
    ) -> None:
        self.random = Random(seed)
        if backends is None:
            fakes = FakeBackend(bounds.context_length), DeferredBackend(bounds.context_length)
            for fake in fakes:
                fake.poisoned = set(poison)
            backends = fakes
        self.serial, self.overlapped = (Harness(bounds, backend) for backend in backends)
        self.exact = share
        self.compare = compare
        self.client = Client(self.random, self.serial, continues, share=share)
        self.waiting: deque[tuple[BegunStep, StepResult]] = deque()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            plan = self.client.plan()
            expected = execute(self.serial.engine, of_objects(plan))
            self.serial.engine.store.check()
            self.client.learn(plan, expected)
            step = self.begin(plan)
            self.overlapped.engine.store.check()
            self.waiting.append((step, expected))
            while len(self.waiting) > self.random.choice((0, 1, 1, 1)):
                self.finish()
        while self.waiting:
            self.finish()
        self.compare_at_rest()

    def begin(self, plan: StepPlan) -> BegunStep:
        return begin(self.overlapped.engine, plan)

    def finish(self) -> None:
        step, expected = self.waiting.popleft()
        self.compare(step.finish(), expected, exact=self.exact)
        self.overlapped.engine.store.check()

    def compare_at_rest(self) -> None:
        states = []
        for harness in (self.serial, self.overlapped):
            engine = harness.engine
            caches = engine.store.sessions.get(0).caches
            sequences = {
                i: (s.length, s.known, s.sampled, s.ids[: s.known].tolist(), s.scored, repr(s.hidden_sum))
                for i, s in caches.items()
            }
            states.append((sequences, engine.store.pages.owned, counted(harness)))
        assert states[0] == states[1]
