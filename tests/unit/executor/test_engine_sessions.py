"""Sessions, epochs, replay, fencing and leases."""

from __future__ import annotations

import pytest
from service_kit.clock import RunningClock

from executor_service.cache.session import REMEMBERED_IDS
from executor_service.contract.plan import Reason, RequestRefused
from tests.unit.executor.fakes import continuation, limits
from tests.unit.executor.harness import EPOCH, Harness, Release, Truncate, fork, opening, row

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def h() -> Harness:
    return Harness()


def refused(reason: Reason, match: str = ".") -> pytest.RaisesExc[RequestRefused]:
    return pytest.RaisesExc(RequestRefused, match=match, check=lambda error: error.refusal.reason is reason)


def test_another_epoch_is_refused_before_anything_changes(h: Harness) -> None:
    before = h.snapshot()
    with refused(Reason.EPOCH, "header.epoch: 3 is over, it is 77"):
        h.step(opening(1, PROMPT), epoch=3)
    assert h.snapshot() == before
    h.step(opening(1, PROMPT), epoch=EPOCH)


def test_caches_of_one_session_do_not_exist_in_another(h: Harness) -> None:
    a, b = (h.engine.open_session(0, 0, "").id for _ in range(2))
    h.step(opening(1, PROMPT), session=a)
    answer = h.row(row(1, 6), session=b).refusal
    assert answer is not None
    assert answer.reason is Reason.CACHE
    assert h.op(Release((1,)), session=b).released == 0
    assert h.row(opening(1, PROMPT), session=b).refusal is None


def test_an_exact_replay_gets_the_stored_reply_and_computes_nothing(h: Harness) -> None:
    session = h.engine.open_session(0, 0, "").id
    first = h.step(opening(1, PROMPT), session=session, step_id=1, digest=b"a")
    decode = h.step(row(1, 6), session=session, step_id=2, digest=b"b")
    forwards = len(h.backend.forwards)
    assert h.step(opening(1, PROMPT), session=session, step_id=1, digest=b"a") is first
    assert h.step(row(1, 6), session=session, step_id=2, digest=b"b") is decode
    assert len(h.backend.forwards) == forwards
    assert h.engine.counters.steps == 2


def test_step_ids_rise_by_one(h: Harness) -> None:
    session = h.engine.open_session(0, 0, "").id
    with refused(Reason.STEP_GAP, "expected 1, is 2"):
        h.step(session=session, step_id=2)
    for step_id in range(1, 7):
        h.step(session=session, step_id=step_id, digest=b"%d" % step_id)
    with refused(Reason.STEP_CONTENT, "step 6 was done with other content"):
        h.step(session=session, step_id=6, digest=b"other")
    with refused(Reason.STEP_FORGOTTEN, "no longer kept"):
        h.step(session=session, step_id=2, digest=b"2")
    h.step(session=session, step_id=3, digest=b"3")


def test_the_shared_session_has_no_step_order(h: Harness) -> None:
    with refused(Reason.INVALID, "session 0"):
        h.step(step_id=1)


def test_replacing_a_session_releases_it_and_fences_its_late_steps(h: Harness) -> None:
    old = h.engine.open_session(0, 0, "").id
    h.step(opening(1, PROMPT), session=old)
    new = h.engine.open_session(old, 0, "").id
    assert h.engine.store.count == 0
    h.engine.store.check()
    with refused(Reason.FENCED, "replaced"):
        h.step(row(1, 6), session=old)
    assert h.row(opening(1, PROMPT), session=new).tokens == continuation(PROMPT, 1)
    h.engine.open_session(12345, 0, "")


def test_closing_a_session_releases_it_and_is_idempotent(h: Harness) -> None:
    session = h.engine.open_session(0, 0, "").id
    h.step(opening(1, PROMPT), opening(2, [1]), session=session)
    assert h.engine.close_session(session) == 2
    assert h.engine.close_session(session) == 0
    with refused(Reason.SESSION):
        h.step(session=session)
    with refused(Reason.INVALID):
        h.engine.close_session(0)


def test_sessions_are_limited() -> None:
    h = Harness(limits(max_sessions=2))
    first = h.engine.open_session(0, 0, "")
    h.engine.open_session(0, 0, "")
    with refused(Reason.SESSIONS):
        h.engine.open_session(0, 0, "")
    h.engine.open_session(first.id, 0, "")


def test_a_session_expires_when_its_lease_runs_out_and_not_before(h: Harness) -> None:
    session = h.engine.open_session(0, 2000, "").id
    h.step(opening(1, PROMPT), session=session)
    h.clock.now_s = 2.0
    h.engine.expire()
    h.step(row(1, 6), session=session)
    h.clock.now_s = 4.0
    h.engine.expire()
    assert h.engine.store.count == 1
    h.clock.now_s = 4.1
    h.engine.expire()
    assert h.engine.store.count == 0
    assert h.engine.counters.sessions_expired == 1
    with refused(Reason.SESSION):
        h.step(session=session)


def test_something_queued_or_a_heartbeat_renews_a_lease(h: Harness) -> None:
    session = h.engine.open_session(0, 2000, "").id
    h.clock.now_s = 3.0
    h.engine.store.sessions.touch(session)
    h.engine.expire()
    assert h.engine.store.sessions.find(session) is not None


def test_leases_are_clamped(h: Harness) -> None:
    assert h.engine.open_session(0, 1, "").lease_s == h.engine.store.leases.min_s
    assert h.engine.open_session(0, 2**32 - 1, "").lease_s == h.engine.store.leases.max_s
    assert h.engine.open_session(0, 0, "").lease_s == h.engine.store.leases.default_s


def test_in_the_shared_session_each_cache_has_a_lease(h: Harness) -> None:
    h.step(opening(1, PROMPT), opening(2, [1, 2]))
    h.clock.now_s = 8.0
    h.row(row(1, 6))
    h.clock.now_s = 11.0
    h.engine.expire()
    h.engine.store.check()
    assert h.row(row(1, 7)).refusal is None
    answer = h.row(row(2, 2)).refusal
    assert answer is not None
    assert answer.reason is Reason.CACHE


def test_the_lease_clock_ignores_time_in_which_the_process_was_stopped() -> None:
    now = [100.0]
    clock = RunningClock(lambda: now[0], cap_s=1.0)
    for _ in range(10):
        now[0] += 0.25
        clock()
    assert clock() == pytest.approx(2.5)
    now[0] += 3600.0
    assert clock() == pytest.approx(3.5)


def test_released_ids_are_refused_for_as_long_as_they_are_remembered(h: Harness) -> None:
    h.row(opening(7, [1]))
    h.op(Release((7,)))
    session = h.engine.store.sessions.get(0)
    for cache_id in range(1000, 1000 + REMEMBERED_IDS - 1):
        session.remember_released(cache_id)
    answer = h.row(opening(7, [1])).refusal
    assert answer is not None
    assert answer.reason is Reason.CACHE_ID_USED
    session.remember_released(1)
    assert h.row(opening(7, [1])).refusal is None


def test_a_refused_opening_does_not_use_up_its_id() -> None:
    h = Harness(limits(total_pages=1))
    assert h.row(opening(1, PROMPT)).refusal is not None
    assert h.row(opening(1, [1, 2])).refusal is None


def test_ops_apply_in_order_before_the_rows(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    result = h.step(
        row(2, 4, tokens=[50]), row(1, 2, tokens=[60]), ops=(fork(1, 2, 4), Truncate(1, 2), Release((3, 4)))
    )
    assert [op.kv_length for op in result.ops] == [4, 2, 0]
    assert result.rows[0].tokens == continuation([*PROMPT[:4], 50], 1)
    assert result.rows[1].tokens == continuation([*PROMPT[:2], 60], 1)


def test_a_refused_op_harms_neither_ops_nor_rows(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    ops = (Truncate(9, 0), Truncate(1, 7), fork(9, 2, 0), fork(1, 1, 0), fork(1, 2, 7), fork(1, 3, 6))
    result = h.step(row(1, 6), ops=ops)
    assert [op.refusal and op.refusal.reason for op in result.ops] == [
        Reason.CACHE,
        Reason.INVALID,
        Reason.CACHE,
        Reason.CACHE_ID_USED,
        Reason.INVALID,
        None,
    ]
    assert result.rows[0].tokens == continuation(PROMPT, 2)[1:]


def test_release_and_truncate_are_idempotent(h: Harness) -> None:
    h.row(opening(1, PROMPT))
    assert [h.op(Truncate(1, 3)).kv_length for _ in range(2)] == [3, 3]
    assert [h.op(Release((1, 1))).released for _ in range(2)] == [1, 0]
