"""Deadlines, cancels and the wait for an executor: no step sent after one contains the sequence."""

from __future__ import annotations

from dataclasses import replace

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import Failure
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, STEP_S, Harness, make_request


def test_a_running_request_ends_at_its_deadline() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", deadline=2.5 * STEP_S, max_tokens=50))
    harness.add(make_request("b", max_tokens=8))
    harness.run()
    assert harness.failed["a"].failure is Failure.DEADLINE
    assert harness.failed["a"].emitted
    assert len(harness.tokens["a", 0]) == 3  # the step under way at the deadline still counts
    assert len(harness.tokens["b", 0]) == 8


def test_a_waiting_request_ends_at_its_deadline() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=1))
    harness.add(make_request("a", max_tokens=50))
    harness.add(make_request("b", deadline=0.2))
    harness.run()
    assert harness.failed["b"].failure is Failure.DEADLINE
    assert not harness.failed["b"].emitted
    assert len(harness.tokens["a", 0]) == 50


def test_the_caller_is_told_when_to_look_again() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    assert harness.core.next_wakeup(0.0) is None
    harness.add(make_request("a", deadline=5.0))
    harness.add(make_request("b", deadline=3.0))
    assert harness.core.next_wakeup(0.0) == 3.0
    harness.cancel("b")
    assert harness.core.next_wakeup(0.0) == 5.0


def test_plan_never_contains_what_is_late_even_without_expire() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", deadline=1.0))
    assert harness.core.plan(1.0) is None
    assert harness.core.next_wakeup(1.0) == 1.0  # the event waits to be fetched
    (failed,) = harness.core.expire(1.0)
    assert failed.request_id == "a"


def test_a_request_that_cannot_begin_in_time_is_not_started_and_is_in_nobodys_way() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_step_tokens=8, prefill_chunk_tokens=8))
    harness.add(make_request("busy", max_tokens=60))
    harness.step()
    deadline = harness.now + 6 * STEP_S
    harness.add(make_request("late", range(40), deadline=deadline))
    harness.add(make_request("behind"))
    harness.now += 3 * STEP_S
    harness.run()
    assert harness.failed["late"].failure is Failure.DEADLINE
    assert "could not have been done" in harness.failed["late"].message
    assert harness.core.snapshot().counters.rows == 60 + 4  # it was never computed
    assert len(harness.tokens["behind", 0]) == 4


def test_a_cancel_while_the_step_is_out_drops_its_result_and_releases_the_cache() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", max_tokens=50))
    harness.step()
    harness.plan()
    harness.cancel("a")
    assert harness.answer() == []
    plan = harness.plan()
    assert plan is not None
    assert (plan.rows, len(plan.releases)) == ((), 1)  # a plan with only releases is sent
    harness.answer()
    assert harness.executor.caches == {}  # type: ignore[attr-defined]
    assert harness.plan() is None
    assert harness.core.cancel("a", harness.now) is None


def test_releases_of_several_ride_together() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    for name in "abc":
        harness.add(make_request(name, max_tokens=2))
    harness.step()
    harness.step()
    plan = harness.plan()
    assert plan is not None
    assert len(plan.releases) == 3


def test_requests_cancelled_while_no_executor_is_there_are_not_kept() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.lose()
    harness.add(make_request("first"))
    for i in range(1000):
        harness.add(make_request(f"{i}"))
        assert harness.core.cancel(f"{i}", harness.now) is not None
    assert len(harness.core._expiry._stranded._since) < 100
    assert harness.core._expiry._stranded.ends() == harness.now + CoreConfig().failover_timeout_s


def test_nobody_waits_for_an_executor_longer_than_the_failover_timeout() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(failover_timeout_s=60.0))
    harness.add(make_request("early", max_tokens=50))
    harness.step()
    harness.lose()
    lost_at = harness.now
    harness.now += 20
    harness.add(make_request("later"))
    assert harness.core.next_wakeup(harness.now) == lost_at + 60
    harness.now = lost_at + 60
    assert harness.plan() is None
    assert harness.failed["early"].failure is Failure.NO_EXECUTOR
    assert harness.failed["early"].emitted
    assert harness.core.live("later")
    assert harness.core.next_wakeup(harness.now) == lost_at + 80
    harness.ready()
    harness.run()
    assert ("later", 0) in harness.finished


def test_what_runs_on_an_executor_that_retires_goes_on_and_the_others_wait_only_so_long() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(failover_timeout_s=60.0, max_running=1))
    harness.add(make_request("runs", max_tokens=50))
    harness.add(make_request("queued"))
    harness.step()
    harness.core.executor_retires()
    retired_at = harness.now
    harness.plan()
    assert harness.core.next_wakeup(harness.now) == retired_at + 60
    harness.answer()
    harness.now = retired_at + 30
    harness.add(make_request("later"))
    harness.now = retired_at + 60
    harness.plan()
    assert harness.failed["queued"].failure is Failure.NO_EXECUTOR
    assert harness.core.live("later")
    harness.answer()
    while ("runs", 0) not in harness.finished:
        harness.step()
    assert not harness.core.holds_caches
    harness.plan()
    assert harness.plan() is None  # nothing is opened there
    harness.lose()
    harness.now = retired_at + 90 - STEP_S
    assert harness.core.next_wakeup(harness.now) == retired_at + 90  # it has waited since it came
    harness.ready()
    harness.run()
    assert ("later", 0) in harness.finished


def test_who_is_preempted_by_an_executor_that_retires_waits_for_another_only_so_long() -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=12)), CoreConfig(failover_timeout_s=60.0))
    for name in "ab":
        harness.add(make_request(name, range(20), max_tokens=28))
    harness.step()
    harness.core.executor_retires()
    while harness.core.snapshot().counters.preemptions == 0:
        harness.step()
    preempted_at = harness.now
    while ("a", 0) not in harness.finished:
        harness.step()
    harness.step()
    assert harness.now <= preempted_at + 60 + STEP_S
    while "b" not in harness.failed:
        harness.step()
    assert harness.failed["b"].failure is Failure.NO_EXECUTOR
    assert harness.failed["b"].emitted
