"""Whose caches and sessions are whose, and what callers without a session leave to the others."""

from __future__ import annotations

import pytest

from executor_service.cache.session import MAX_CALLERS, Sessions
from executor_service.contract.plan import (
    Op,
    Opening,
    Reason,
    Release,
    RequestRefused,
    Row,
    RowResult,
    StepResult,
)
from tests.support.engine_steps import begin
from tests.unit.executor.fakes import continuation, limits
from tests.unit.executor.harness import Harness, fork, opening, plan, row
from tests.unit.executor.test_engine_sessions import refused

PROMPT = [5, 6, 7, 8, 9, 10]


class Callers(Harness):
    """An engine with several callers."""

    def of(
        self, caller: str, *items: Row | Opening, ops: tuple[Op, ...] = (), session: int = 0
    ) -> StepResult:
        result = begin(self.engine, plan(*items, ops=ops, session=session), caller=caller).finish()
        self.engine.store.check()
        return result

    def only(self, caller: str, item: Row | Opening, session: int = 0) -> RowResult:
        return self.of(caller, item, session=session).rows[0]


def test_each_caller_has_a_session_0_of_its_own() -> None:
    h = Callers()
    assert h.only("a", opening(1, PROMPT)).tokens == continuation(PROMPT, 1)
    stranger = h.only("b", row(1, 6)).refusal
    assert stranger is not None
    assert stranger.reason is Reason.CACHE
    assert h.of("b", ops=(Release((1,)),)).ops[0].released == 0
    assert h.only("b", opening(1, PROMPT)).refusal is None
    assert h.of("b", ops=(Release((1,)),)).ops[0].released == 1
    assert h.only("a", row(1, 6)).refusal is None


def test_a_session_is_unknown_to_all_but_its_owner() -> None:
    h = Callers()
    session = h.engine.open_session(0, 0, "", "", "a").id
    assert h.only("a", opening(1, PROMPT), session).refusal is None
    unknown = session + 1
    for named in (session, unknown):
        with refused(Reason.SESSION, "unknown session"):
            h.of("b", row(1, 6), session=named)
        with refused(Reason.SESSION, "unknown session"):
            h.engine.store.sessions.get(named, "b")
        assert h.engine.close_session(named, "b") == 0
        with refused(Reason.SESSION, "unknown session"):
            h.engine.look(named, 0, (), "b")
        h.engine.open_session(named, 0, "", "", "b")  # replaces nothing
    assert h.only("a", row(1, 6), session).refusal is None


def test_an_owners_name_replaces_sessions_of_the_same_caller_alone() -> None:
    h = Callers()
    session = h.engine.open_session(0, 0, "", "scheduler", "a").id
    h.engine.open_session(0, 0, "", "scheduler", "b")
    assert h.only("a", opening(1, PROMPT), session).refusal is None
    h.engine.open_session(0, 0, "", "scheduler", "a")
    with refused(Reason.FENCED, "replaced"):
        h.of("a", row(1, 6), session=session)


def test_only_the_owner_of_a_fenced_session_is_told_of_the_fence() -> None:
    h = Callers()
    old = h.engine.open_session(0, 0, "", "", "a").id
    h.engine.open_session(old, 0, "", "", "a")
    with refused(Reason.FENCED, "replaced"):
        h.of("a", session=old)
    with refused(Reason.SESSION, "unknown session"):
        h.of("b", session=old)


def test_sessions_are_limited_for_each_caller() -> None:
    h = Callers(limits(max_sessions_per_caller=2))
    for _ in range(2):
        h.engine.open_session(0, 0, "", "", "a")
    with refused(Reason.SESSIONS, "a has 2 sessions open"):
        h.engine.open_session(0, 0, "", "", "a")
    h.engine.open_session(0, 0, "", "", "b")


def test_callers_without_a_session_leave_pages_to_sessions() -> None:
    bounds = limits(max_default_pages=4)
    h = Callers(bounds)
    page = bounds.page_size
    assert h.only("a", opening(1, list(range(1, 3 * page + 1)))).refusal is None  # three pages
    for caller in ("a", "b"):  # together: one caller's names do not multiply the quota
        over = h.only(caller, opening(2, list(range(1, 2 * page)))).refusal
        assert over is not None
        assert over.reason is Reason.QUOTA
        assert "needs 2 pages, 1 are left of the 4 that callers without a session share" in over.message
    assert h.only("b", opening(3, [1] * page)).refusal is None
    grown = h.only("b", row(3, page)).refusal  # one more page
    assert grown is not None
    assert "openings" not in grown.message
    assert grown.reason is Reason.QUOTA
    session = h.engine.open_session(0, 0, "", "", "b").id
    assert h.only("b", opening(2, list(range(1, 2 * page))), session).refusal is None
    h.of("a", ops=(Release((1,)),))
    assert h.only("b", row(3, page)).refusal is None


def test_rows_of_one_step_share_what_is_left() -> None:
    bounds = limits(max_default_pages=1)
    h = Callers(bounds)
    first, second = h.of("a", opening(1, PROMPT[:2]), opening(2, PROMPT[:3])).rows
    assert first.refusal is None
    assert second.refusal is not None
    assert "0 are left of the 1" in second.refusal.message


def test_a_row_that_is_refused_leaves_the_quota_to_the_next() -> None:
    bounds = limits(max_default_pages=3, total_pages=2)
    h = Callers(bounds)
    page = bounds.page_size
    first, second = h.of("a", opening(1, [1] * 3 * page), opening(2, [2] * 2 * page)).rows
    assert first.refusal is not None
    assert first.refusal.reason is Reason.PAGES
    assert second.refusal is None


def test_callers_without_a_session_leave_caches_to_sessions() -> None:
    h = Callers(limits(max_default_sequences=2))
    first, second, third = h.of("a", *(opening(id_, PROMPT) for id_ in (1, 2, 3))).rows
    assert (first.refusal, second.refusal) == (None, None)
    assert third.refusal is not None
    assert third.refusal.reason is Reason.QUOTA
    assert "share 2 caches, all in use; open a session" in third.refusal.message
    forked = h.of("a", ops=(fork(1, 4, 2),)).ops[0].refusal
    assert forked is not None
    assert forked.reason is Reason.QUOTA
    session = h.engine.open_session(0, 0, "", "", "a").id
    assert h.only("a", opening(1, PROMPT), session).refusal is None


def test_callers_that_hold_nothing_are_forgotten_before_there_are_too_many() -> None:
    sessions = Sessions(10.0, 8, lambda: 0.0)
    kept = sessions.get(0, "kept")
    kept.caches[1] = None  # type: ignore[assignment]  # any
    for number in range(2 * MAX_CALLERS):
        sessions.get(0, f"caller {number}")
    assert len(list(sessions)) == MAX_CALLERS
    assert sessions.get(0, "kept") is kept
    for session in sessions:
        session.caches[1] = None  # type: ignore[assignment]
    with pytest.raises(RequestRefused, match="open a session"):
        sessions.get(0, "one more")
