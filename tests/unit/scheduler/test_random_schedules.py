"""Random schedules over the real engine: whatever happens to a request, its tokens are those of its solo run.

Pools are barely larger than one request, so that everything is preempted all the time; requests are
cancelled, stopped, run out of time, lose their executor before and after it has computed a step. Some were
begun elsewhere, and continue what came there; some have a grammar. Some have their prompt scored, and some
are evaluations: they bring the scores and vectors of their solo run, each token's score once. All may have an
adapter, of more adapters than there are slots.
With speculation they draft by n-grams and on a draft executor that is small, slow, lost and frozen.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_service.core import prompt_prefixes
from scheduler_service.core.errors import TooLate
from scheduler_service.core.events import EndReason, Failure
from scheduler_service.core.request import Continued, DraftingWish, Request
from scheduler_service.core.step import Capacity
from tests.support.failed_schedules import FOLDER, save
from tests.unit.executor.deferred import Deferring
from tests.unit.scheduler.engine_executor import ADAPTERS, EngineExecutor
from tests.unit.scheduler.grammar_conditions import (
    AHEAD,
    DRAFTED,
    PLAIN,
    REJECTED_FORCED,
    TRUNCATED,
    GrammarConditions,
)
from tests.unit.scheduler.harness import STEP_S, Harness, check_log, parts
from tests.unit.scheduler.schedules import BACKENDS, CONTEXT, LATE_BACKENDS, Happening, Schedule, schedules


@pytest.fixture(autouse=True, scope="module")
def short_beginnings() -> Iterator[None]:
    """Prompts wait for beginnings as short as they have them here."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(prompt_prefixes, "MIN_AWAITED_TOKENS", 4)
        yield


MAX_STEPS_WITHOUT_PROGRESS = 100
"""Without a new token or an end. A begun output of CONTEXT tokens takes up to 45 steps until its grammar has
read it, if the grammar takes a millisecond for each, and then 24 until it is computed, two tokens a step."""
UNREAD = "rows launched behind drafts that nobody had read"


@dataclass(frozen=True)
class Solo:
    """What a request brings when it is alone, by index."""

    tokens: list[list[int]]
    logprobs: list[list[float]]  # of its prompt
    top_ids: list[list[int]]
    vectors: list[bytes]  # b"": none


@functools.lru_cache(maxsize=4096)
def solo(request: Request, request_tokens: int, backend: str) -> Solo:
    """What the plain request brings when it is alone in a pool with plenty of room."""
    target = BACKENDS[backend][0](request_tokens)
    size = target.info.hidden_size
    capacity = Capacity(512, 4, request_tokens, 16, 16, 512, max_adapter_slots=1, hidden_size=size)
    harness = Harness(EngineExecutor(capacity, target))
    harness.add(request)
    harness.run()
    keys = [(request.id, index) for index in range(request.n)]
    return Solo(
        [harness.tokens[key] for key in keys],
        [harness.logprobs(key) for key in keys],
        [top_ids(harness, key) for key in keys],
        [harness.vectors.get(key, b"") for key in keys],
    )


def top_ids(harness: Harness, key: tuple[str, int]) -> list[int]:
    """The alternatives to the prompt's tokens, so far."""
    return [id_ for scores in harness.scores.get(key, []) for id_ in scores.top_ids]


class Run:
    """One schedule under way."""

    harness_type: type[Harness] = Harness

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        target, drafter = BACKENDS[schedule.backend]
        if schedule.late:
            target = LATE_BACKENDS[schedule.backend]
        self.target = target(CONTEXT)
        self.executor = EngineExecutor(schedule.capacity, self.target, schedule.token_s)
        self.draft: EngineExecutor | None = None
        if schedule.draft is not None:
            context_length = schedule.draft.context_length
            self.draft = EngineExecutor(schedule.draft, drafter(context_length), schedule.token_s)
        self.harness = self.harness_type(self.executor, schedule.config, draft=self.draft)
        self.conditions = GrammarConditions(self.harness)
        self.draft_ticks = itertools.cycle(schedule.draft_ticks)
        self.draft_due = 0  # ticks until the draft step in flight is answered
        self.draft_connected = self.draft is not None
        self.stopped: set[tuple[str, int]] = set()
        self.ended_elsewhere: set[tuple[str, int]] = set()
        self.cancelled: set[str] = set()
        self.refused: set[str] = set()
        self.losses_in_flight: dict[str, int] = {}
        self.idle_steps = 0
        self.squeezed = False
        self.number = 0  # of the step that is taken
        self.journal: list[object] = []  # plans and their answers

    def whole(self) -> None:
        """Run it to its end, and judge what it brought."""
        self.go()
        self.judge()
        self.conditions.ended()

    def go(self) -> None:
        harness = self.harness
        last = max(*self.schedule.arrivals, *(h.step for h in self.schedule.happenings), 0)
        while (number := self.number) <= last or not harness.idle:
            for request, arrival, begun in zip(
                self.schedule.requests, self.schedule.arrivals, self.schedule.begun, strict=True
            ):
                if arrival == number:
                    self.add(
                        replace(
                            request,
                            arrival=harness.now,
                            deadline=self.deadline(request),
                            continued=self.continued(request, begun),
                        )
                    )
            if self.squeezed and number > last:
                self.squeeze(0)
            before = self.progress()
            self.step(number)
            self.idle_steps = self.idle_steps + 1 if self.stuck(before) else 0
            assert self.idle_steps < MAX_STEPS_WITHOUT_PROGRESS, "no progress"
            self.number += 1
        check_log(harness.core)

    def add(self, request: Request) -> None:
        try:
            self.harness.add(request)
        except TooLate:
            assert request.deadline is not None
            self.refused.add(request.id)

    def deadline(self, request: Request) -> float | None:
        return None if request.deadline is None else self.harness.now + request.deadline

    def expected(self, request: Request) -> Solo:
        """What it brings when it is alone, plain, and not begun elsewhere."""
        capacity = self.schedule.capacity
        limit = min(CONTEXT, capacity.total_pages * capacity.page_size)
        plain = replace(request, deadline=None, identity="", weight=1.0, speculation=DraftingWish())
        return solo(plain, limit, self.schedule.backend)

    def continued(self, request: Request, begun: tuple[float, ...]) -> tuple[Continued, ...]:
        """What was produced elsewhere; at least one completion has not ended there."""
        made: list[Continued] = []
        if request.evaluation is not None:
            return ()
        for index, share in enumerate(begun[: request.n]):
            ids = self.expected(request).tokens[index]
            finished = share > 1 and len(made) < request.n - 1
            if had := ids[: int(min(share, 1.0) * len(ids))]:
                made.append(Continued(index, tuple(had), finished))
            if had and finished:
                self.ended_elsewhere.add((request.id, index))
        return tuple(made)

    def progress(self) -> tuple[int, int, int]:
        harness = self.harness
        scores = sum(map(len, harness.scores.values()))
        return sum(map(len, harness.tokens.values())), scores, len(harness.finished) + len(harness.failed)

    def stuck(self, before: tuple[int, int, int]) -> bool:
        snapshot = self.harness.core.snapshot()
        working = snapshot.running or snapshot.waiting
        return bool(working) and not self.squeezed and self.progress() == before

    def step(self, number: int) -> None:
        happenings = [h for h in self.schedule.happenings if h.step == number]
        for happening in happenings:
            if not happening.in_flight:
                self.happen(happening)
        self.run_draft()
        while (plan := self.harness.plan()) is not None:
            self.journal.append(plan)
            self.conditions.sent(plan, tuple(self.harness.unanswered)[:-1])
            if self.schedule.late:
                self.executor.send(plan)
        for happening in happenings:
            if happening.in_flight:
                self.happen(happening)
        if self.harness.unanswered:
            plan = self.harness.unanswered[0]
            answer = self.executor.execute(plan)
            self.journal.append(answer)
            self.conditions.answered(plan, answer)
            self.harness.answer(answer)
        else:
            self.harness.now += STEP_S

    def run_draft(self) -> None:
        """Answer the draft step when its time has come, send the next; some take no time at all."""
        harness = self.harness
        self.draft_due -= 1
        for _ in range(8):
            if harness.drafting is None and self.draft_connected and (plan := harness.plan_draft()):
                self.conditions.sent_to_draft(plan)
                self.draft_due = next(self.draft_ticks)
            if harness.drafting is None or self.draft_due > 0:
                return
            harness.answer_draft()

    def lose_draft(self, *, after_computing: bool) -> None:
        if self.draft is not None and self.draft_connected:
            if after_computing and self.harness.drafting is not None:
                self.draft.execute(self.harness.drafting)
            self.harness.lose_draft()
            self.draft_connected = False
            assert self.harness.plan_draft() is None, "a plan for no draft executor"

    def happen(self, happening: Happening) -> None:
        harness = self.harness
        name = f"r{happening.who}"
        if happening.kind == "cancel":
            harness.cancel(name)
            self.cancelled.add(name)
        elif happening.kind == "stop":
            if harness.core.live(name):
                index = happening.step % harness.requests[name].n
                ended = {*harness.finished, *self.ended_elsewhere}
                if harness.tokens[name, index] and (name, index) not in ended:
                    self.stopped.add((name, index))
                    harness.stop(name, index)
        elif happening.kind == "idle":
            harness.now += 0.3
        elif happening.kind == "squeeze":
            self.squeeze(min(8, self.schedule.capacity.page_size * (1 + happening.step % 6)))
        elif happening.kind == "squeeze slots":
            self.squeeze(1, ADAPTERS[-1])
        elif happening.kind == "squeeze draft":
            if self.draft is not None:
                self.draft.squeeze(happening.step % 4)
        elif happening.kind == "draft returns":
            if self.draft is not None and not self.draft_connected:
                self.draft_connected = True
                harness.core.draft_ready(self.draft.capacity)
        elif "draft" in happening.kind:
            self.lose_draft(after_computing="after" in happening.kind)
        else:
            self.lose(after_computing=happening.kind == "lose after computing")

    def squeeze(self, tokens: int, adapter: bytes = b"") -> None:
        if self.squeezed:
            tokens = 0
        self.squeezed = bool(tokens)
        self.executor.squeeze(tokens, adapter)

    def lose(self, *, after_computing: bool) -> None:
        harness = self.harness
        for plan in harness.unanswered:
            for part in parts(plan):
                if part.cache_id in harness.owner:
                    who = harness.owner[part.cache_id][0]
                    self.losses_in_flight[who] = self.losses_in_flight.get(who, 0) + 1
            if after_computing:
                self.executor.execute(plan)
        self.conditions.losing()
        harness.lose()
        assert harness.plan() is None, "a plan for no executor"
        harness.now += 0.05
        harness.ready()

    def judge(self) -> None:
        harness = self.harness
        self.executor.squeeze(0)
        assert self.executor.owned_pages == 0, "pages leaked"
        if self.draft is not None:
            self.draft.squeeze(0)
            assert self.draft.owned_pages == 0, "pages of the draft executor leaked"
        for request in self.schedule.requests:
            if request.id in self.refused:
                continue
            expected = self.expected(request)
            failed = harness.failed.get(request.id)
            if failed is not None:
                if failed.failure is Failure.CANCELLED:
                    assert request.id in self.cancelled
                elif failed.failure is Failure.DEADLINE:
                    assert request.deadline is not None
                else:
                    assert failed.failure is Failure.POISON, failed
                    assert self.losses_in_flight[request.id] >= 3
            for index in range(request.n):
                key = request.id, index
                tokens = harness.tokens[key]
                if failed is not None or key in self.stopped:
                    assert tokens == expected.tokens[index][: len(tokens)]
                else:
                    assert tokens == expected.tokens[index]
                self.judge_prompt(key, expected, is_whole=failed is None)
                if key in harness.finished:
                    stopped = harness.finished[key].reason is EndReason.STOP_STRING
                    assert stopped == (key in self.stopped)
                else:
                    ended = failed is not None or key in self.ended_elsewhere
                    assert ended, f"{key} has not ended"

    def judge_prompt(self, key: tuple[str, int], expected: Solo, *, is_whole: bool) -> None:
        """Scores and vectors are those of the solo run; not bit by bit, since chunks differ."""
        harness, index = self.harness, key[1]
        scores, vector = harness.logprobs(key), harness.vectors.get(key, b"")
        if is_whole and not any(one.ids for one in harness.requests[key[0]].continued):
            assert len(scores) == len(expected.logprobs[index])
            assert len(vector) == len(expected.vectors[index])
        assert np.allclose(scores, expected.logprobs[index][: len(scores)], atol=1e-5)
        ids = top_ids(harness, key)
        assert ids == expected.top_ids[index][: len(ids)]
        if vector:
            assert np.allclose(
                np.frombuffer(vector, "<f4"), np.frombuffer(expected.vectors[index], "<f4"), atol=1e-5
            )


def check(schedule: Schedule) -> Counter[str]:
    """Run and judge it; returns what happened to sequences with a grammar. A failure leaves a folder."""
    run = Run(schedule)
    try:
        run.whole()
    except Exception as error:
        name = os.environ.get("PYTEST_CURRENT_TEST", "schedule").split("::")[-1].split(" ")[0]
        save(FOLDER / name, schedule, run.number, error, run.journal)
        raise
    counts = run.conditions.counts
    if isinstance(run.target, Deferring):
        counts[UNREAD] += run.target.open_lengths
    return counts


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_every_output_equals_its_solo_run(schedule: Schedule) -> None:
    check(schedule)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_speculated_output_equals_its_plain_solo_run(backend: str, data: st.DataObject) -> None:
    check(data.draw(schedules(backend, speculate=True)))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_so_it_does_where_verifications_run_ahead(backend: str, data: st.DataObject) -> None:
    check(data.draw(schedules(backend, speculate=True, late=True, depths=(2,))))


def check_1000(drawn: st.SearchStrategy[Schedule], wanted: Iterable[str], examples: int = 1000) -> None:
    """Check a thousand schedules, in which sequences with a grammar must have met all conditions wanted."""
    counts: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(drawn)
    def check_one(schedule: Schedule) -> None:
        counts.update(check(schedule))

    check_one()
    print(f"\n{examples} schedules, with a grammar:", ", ".join(f"{counts[name]} {name}" for name in wanted))
    assert all(counts[name] for name in wanted)
    assert not counts[REJECTED_FORCED]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_output_equals_its_solo_run_1000_times(depth: int) -> None:
    check_1000(schedules(depths=(depth,)), (*PLAIN, *([AHEAD] if depth != 1 else [])))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_speculated_output_equals_its_plain_solo_run_1000_times(backend: str, depth: int) -> None:
    wanted = (*PLAIN, *DRAFTED, TRUNCATED, *([AHEAD] if depth != 1 else []))
    check_1000(schedules(backend, speculate=True, depths=(depth,)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_so_it_does_where_verifications_run_ahead_1000_times(backend: str) -> None:
    wanted = (*PLAIN, *DRAFTED, TRUNCATED, AHEAD, UNREAD)
    check_1000(schedules(backend, speculate=True, late=True, depths=(2,)), wanted)
