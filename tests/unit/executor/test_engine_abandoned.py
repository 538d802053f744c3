"""A step that nobody waits for any more: undone between two of its forwards, or done as if nothing was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from executor_service.backends.base import Backend
from executor_service.cache.kv_cache import KvCache
from executor_service.contract.plan import Abandoned, Reason, RequestRefused, StepPlan
from tests.support import engine_steps
from tests.support.engine_steps import BegunStep, execute, run
from tests.unit.executor.deferred import DeferredBackend
from tests.unit.executor.fakes import FakeBackend, continuation, ids, limits
from tests.unit.executor.harness import Harness, Release, Truncate, fork, opening, plan, row
from tests.unit.executor.two_ways import seen

PROMPT = [5, 6, 7, 8, 9, 10]
LONG = list(range(20, 43))
PIECE = 4


class Client:
    """Waits until it was asked so many times."""

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def __call__(self) -> bool:
        self.patience -= 1
        return self.patience >= 0


class Prepared(Harness):
    """Cache 2 shares a partial page with cache 1; the one of cache 3 is published; 4 has a prompt pending."""

    def __init__(self, backend: Backend | None = None, *, owned: bool = False, **bounds: int) -> None:
        super().__init__(limits(max_piece_tokens=PIECE, **bounds), backend)
        self.session = self.engine.open_session(0, 0, "").id if owned else 0
        openings = opening(1, PROMPT), opening(3, [4] * 8), opening(4, LONG[:9], limit=3)
        self.step(*openings, session=self.session)
        self.step(opening(5, [1, 2]), ops=(fork(1, 2, 6), Truncate(3, 6)), session=self.session)

    def state(self) -> list[object]:
        """Everything that may not change, ids that can't be used again included."""
        session = self.engine.store.sessions.get(self.session)
        used = [session.used(cache_id) for cache_id in range(12)]
        return [self.engine.store.count, used, self.snapshot(), session.caches.copy()]


def begin(h: Harness, what: StepPlan, wanted: Callable[[], bool]) -> BegunStep:
    return engine_steps.begin(h.engine, what, wanted, abandonable=True)


STEPS: dict[str, StepPlan] = {
    "an opening": plan(opening(9, LONG)),
    "a prefix hit": plan(opening(9, [4] * 4 + LONG)),
    "a chunk and an opening": plan(row(4, 3), opening(9, LONG)),
    "drafts and an opening": plan(row(1, 6, drafts=[1, 2, 3]), opening(9, LONG)),
    "several steps": plan(row(1, 6, steps=5)),
    "several steps of two rows": plan(row(1, 6, steps=5), row(5, 2, steps=2)),
    "given tokens": plan(row(1, 6, tokens=[1, 2, 3, 1, 2, 3])),
    "a shared page": plan(row(1, 6), row(2, 6, tokens=[1, 2, 3, 4, 5, 6])),
    "a published page": plan(row(3, 6, tokens=[1]), opening(9, LONG)),
    "a refused row": plan(row(1, 99), row(77, 1), opening(9, LONG)),
    "release": plan(opening(9, LONG), ops=(Release((5, 3, 88)),)),
    "truncate": plan(row(1, 3, tokens=[7] * 9), ops=(Truncate(1, 3),)),
    "truncate into a published page": plan(row(3, 5, tokens=[7] * 9), ops=(Truncate(3, 5),)),
    "truncate of what has a prompt pending": plan(opening(9, LONG), ops=(Truncate(4, 1),)),
    "fork": plan(row(8, 2, tokens=[7] * 9), row(5, 2), ops=(fork(5, 8, 2),)),
    "all ops": plan(opening(9, LONG), ops=(Release((1,)), fork(5, 8, 1), Truncate(5, 1), Release((2, 8)))),
    "a refused op": plan(opening(9, LONG), ops=(Truncate(5, 3), fork(1, 4, 2), Release((5,)))),
}


@pytest.mark.parametrize("backend", [FakeBackend, DeferredBackend])
@pytest.mark.parametrize("owned", [False, True], ids=["session 0", "a session"])
@pytest.mark.parametrize("name", STEPS)
def test_wherever_it_is_given_up_nothing_has_changed_and_it_may_be_sent_again(
    name: str, owned: bool, backend: type[Backend]
) -> None:
    reference, h = Prepared(owned=owned), Prepared(backend(), owned=owned)
    numbered = replace(STEPS[name], step_id=int(owned), digest=b"d")
    before = len(reference.backend.forwards)
    expected = execute(reference.engine, replace(numbered, session_id=reference.session))
    forwards = len(reference.backend.forwards) - before
    assert forwards > 1

    what, state, counters = replace(numbered, session_id=h.session), h.state(), replace(h.engine.counters)
    for patience in range(forwards):
        with pytest.raises(Abandoned):
            begin(h, what, Client(patience))
        h.engine.store.check()
        assert h.state() == state
        if owned:
            with pytest.raises(RequestRefused, match="expected 1, is 2: steps are missing"):
                h.step(row(1, 6), session=h.session, step_id=2)
    counters.steps_abandoned, counters.compute_s = forwards, h.engine.counters.compute_s
    assert h.engine.counters == counters

    done = begin(h, what, Client(forwards)).finish()  # nobody waits for it since its last forward began
    h.engine.store.check()
    assert seen(done, exact=True) == seen(expected, exact=True)
    assert h.state()[:2] == reference.state()[:2]
    if owned:
        assert execute(h.engine, what) is done


def test_the_pages_of_a_step_that_was_given_up_hold_nothing_that_another_reads() -> None:
    """The fake refuses to read stale KV; here freed pages go to others, then the old rows go on."""
    h = Prepared()
    for name in STEPS:
        with pytest.raises(Abandoned):
            begin(h, STEPS[name], Client(1))
        h.step(opening(11 + len(h.backend.forwards), [60] * 40))
    h.engine.store.check()
    answers = h.step(row(1, 6), row(2, 6, tokens=[1]), row(3, 6, tokens=[1]), row(4, 3), row(5, 2)).rows
    expected = [PROMPT, [*PROMPT, 1], [4] * 6 + [1], LONG[:9], [1, 2]]
    expected[0], expected[4] = PROMPT + continuation(PROMPT, 1), [1, 2, *continuation([1, 2], 1)]
    assert [answer.tokens for answer in answers] == [continuation(known, 1) for known in expected]


def test_a_step_that_can_not_be_given_up_is_asked_for_all_the_same_and_done() -> None:
    h, client = Prepared(), Client(0)
    step = engine_steps.begin(h.engine, plan(opening(9, LONG)), client)
    assert step.finish().rows[0].tokens == continuation(LONG, 1)
    assert client.patience == -6


def test_a_step_of_one_forward_is_done_once_it_is_begun() -> None:
    h = Prepared()
    assert begin(h, plan(row(1, 6), opening(9, [1, 2])), Client(0)).finish().rows[0].refusal is None
    assert begin(h, plan(ops=(Release((9,)),)), Client(0)).finish().ops[0].released == 1


def test_a_step_that_needs_the_pages_that_it_releases_is_computed_to_its_end() -> None:
    h = Prepared(total_pages=12)
    with pytest.raises(Abandoned):
        begin(h, plan(opening(9, LONG[:16]), ops=(Release((1,)),)), Client(1))
    release = Release((1, 2, 3, 4, 5))
    step = begin(h, plan(opening(9, LONG + LONG), ops=(release,)), Client(1))
    assert step.finish().ops[0].released == 5
    assert step.finish().rows[0].tokens == continuation(LONG + LONG, 1)
    h.engine.store.check()


def test_a_step_that_no_pages_are_enough_for_is_refused_row_by_row() -> None:
    h = Prepared(total_pages=8)
    what = plan(opening(9, LONG + LONG), row(1, 6, steps=3), ops=(Release((2,)),))
    result = begin(h, what, Client(9)).finish()
    refusal = result.rows[1].refusal
    assert refusal is not None
    assert refusal.reason is Reason.PAGES
    h.engine.store.check()


def test_the_step_under_way_is_done_before_a_long_one_is_begun_behind_it() -> None:
    h = Prepared(DeferredBackend())
    ahead = h.begin(row(1, 6))
    assert ahead.result is None
    asked: list[bool] = []

    def wanted() -> bool:
        asked.append(ahead.result is not None)
        return len(asked) < 3

    with pytest.raises(Abandoned):
        begin(h, plan(opening(9, LONG)), wanted)
    assert asked == [True] * 3
    asked.clear()
    ahead = h.begin(row(1, 7))
    assert engine_steps.begin(h.engine, plan(opening(9, LONG)), wanted).result is not None
    assert asked == [True] * 6
    h.engine.store.check()


def test_a_long_row_that_is_not_finite_is_undone_alone() -> None:
    h = Prepared()
    before = h.snapshot()
    h.backend.poisoned = {LONG[PIECE - 1]}
    refusal = begin(h, plan(opening(9, LONG)), Client(9)).finish().rows[0].refusal
    assert refusal is not None
    assert refusal.reason is Reason.NOT_FINITE
    h.engine.store.check()
    assert h.snapshot() == before


def test_what_was_held_for_the_way_back_is_free_in_the_reply() -> None:
    h, plain = Prepared(), Prepared()
    what = STEPS["all ops"]
    assert seen(begin(h, what, Client(99)).finish(), exact=True) == seen(
        execute(plain.engine, what), exact=True
    )
    assert h.engine.store.pages.free == plain.engine.store.pages.free


def test_forward_is_given_up_between_its_inputs() -> None:
    h = Prepared()
    inputs = [ids(1, 2), ids(3), ids(4)]
    assert len(run(h.engine.forward_once(inputs, frozenset({"hidden"})), Client(3))) == 3
    with pytest.raises(Abandoned):
        run(h.engine.forward_once(inputs, frozenset({"hidden"})), Client(2))


def test_a_page_is_copied_before_it_is_written_where_others_know_it() -> None:
    cache = KvCache(8, 4)
    table, _ = cache.open(b"", ids(1, 2, 3, 4, 5, 6))
    cache.reserve(table, 0, 6)
    assert [cache.must_copy(table, start) for start in (0, 5, 8)] == [False, False, False]
    cache.publish(table, ids(1, 2, 3, 4, 5, 6), 6)
    assert [cache.must_copy(table, start) for start in (3, 4)] == [True, False]
    cache.fork(table, 6)
    assert cache.must_copy(table, 5)
