"""A request is found by its id: where it is, why, and what would end its wait, without those of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core import wait_report
from scheduler_service.core.wait_report import Phase, WaitReport
from scheduler_service.core.waiting.reasons import WaitReason
from scheduler_service.rpc.codec.waits import request_wait
from tests.unit.scheduler.constructed_waits import harness_of, run_one, small
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, STEP_S, Harness, make_request


def why(harness: Harness, request_id: str) -> WaitReport:
    report = harness.core.why(request_id, harness.now)
    assert report is not None
    return report


def short_of_pages() -> Harness:
    """`b` needs 6 pages and finds 4; `c` is of the same identity, `x` of another."""
    harness = harness_of(small())
    harness.add(make_request("a", range(20), max_tokens=16, identity="mine"))
    harness.step()
    harness.add(make_request("b", range(100, 120), max_tokens=4, identity="mine", labels={"job": "7"}))
    harness.add(make_request("c", identity="mine"))
    harness.step()
    return harness


def test_the_first_of_an_identity_says_what_it_needs_and_finds_and_those_behind_it_too() -> None:
    harness = short_of_pages()
    first, behind = why(harness, "b"), why(harness, "c")
    assert (first.phase, first.reason, first.position) == (Phase.QUEUED, WaitReason.PAGES, 1)
    assert (behind.reason, behind.position) == (WaitReason.OWN_EARLIER, 2)
    for one in (first, behind):
        assert (one.first_reason, one.needed, one.available) == (WaitReason.PAGES, 6, 4)
    assert first.labels == {"job": "7"}


def test_another_identitys_turn_has_no_counts_of_the_other() -> None:
    harness = harness_of(max_running=1)
    run_one(harness, identity="x")
    for name in "yz":
        harness.add(make_request(name, identity=name))
        harness.step()
    [other] = [one for name in "yz" if (one := why(harness, name)).reason is WaitReason.OTHER_TURN]
    assert (other.position, other.needed, other.available) == (1, 0, 0)
    assert other.next_reason is WaitReason.SEATS


def test_the_sums_of_a_live_request_are_its_wait_so_far() -> None:
    harness = short_of_pages()
    harness.now += 2.0
    report = why(harness, "b")
    assert sum(s for _, s in report.queue_waits) == pytest.approx(harness.now)  # it arrived at 0
    assert why(harness, "b").queue_waits == report.queue_waits, "asking changes nothing"
    harness.run()
    ended = why(harness, "b")
    assert ended.phase is Phase.ENDED
    assert ended.queue_waits == harness.finished["b", 0].usage.queue_waits


def test_what_ended_knows_its_own_pace_and_how_many_tokens_it_got() -> None:
    harness = harness_of()
    harness.add(make_request("a", max_tokens=5))
    harness.add(make_request("one", max_tokens=1))
    harness.run()
    for name, tokens, token_s in (("a", 5, STEP_S), ("one", 1, 0.0)):
        report = why(harness, name)
        assert (report.phase, report.tokens) == (Phase.ENDED, tokens)
        assert report.token_s == pytest.approx(token_s)


def test_how_many_places_and_slots_there_are_in_all_is_known() -> None:
    harness = harness_of(max_running=1)
    run_one(harness, identity="x")
    for name, who in (("y", "x"), ("z", "z")):
        harness.add(make_request(name, identity=who))
    harness.step()
    assert (why(harness, "y").total, why(harness, "z").total) == (1, 1)
    slots = harness_of(replace(CAPACITY, max_adapter_slots=1))
    run_one(slots, adapter=b"1")
    slots.add(make_request("b", adapter=b"2"))
    slots.step()
    report = why(slots, "b")
    assert request_wait(report, slots.now, with_identity=False).total == 1
    assert (report.reason, report.needed, report.available, report.total) == (
        WaitReason.ADAPTER_SLOT,
        1,
        0,
        1,
    )


def test_a_preempted_request_is_not_queued_but_preempted() -> None:
    harness = harness_of()
    run_one(harness)
    assert why(harness, "a").phase is Phase.RUNNING
    harness.now += 3.0
    harness.lose()
    report = why(harness, "a")
    assert (report.phase, report.reason) == (Phase.PREEMPTED, WaitReason.NO_EXECUTOR)
    assert report.since == harness.now


def test_what_runs_and_what_waits_know_how_long_steps_take() -> None:
    harness = short_of_pages()
    plan = harness.plan()
    assert plan is not None
    harness.now += 5.0
    for name in "ab":
        assert (why(harness, name).step_s, why(harness, name).step_age_s) == (0.0, 5.0)
    harness.answer(replace(harness.executor.execute(plan), compute_s=0.3))
    for name in "ab":
        assert why(harness, name).step_s > 0.0
        assert why(harness, name).step_age_s == 0.0


def test_a_held_completion_has_no_place_in_the_queue() -> None:
    harness = harness_of(max_step_tokens=16)
    harness.add(make_request("a", range(40), n=2))
    harness.step()
    report = why(harness, "a")
    assert (report.reason, report.position) == (WaitReason.PREFIX, 0)


def test_slow_requests_have_waited_longer_than_predicted_and_than_a_second() -> None:
    harness = short_of_pages()
    harness.add(make_request("theirs", identity="theirs"))
    harness.now += 0.5
    assert harness.core.slow(harness.now, 9) == ([], 0)
    harness.now += 100.0
    mine, left_out = harness.core.slow(harness.now, 1, "mine")
    assert ([one.request_id for one in mine], left_out) == (["b"], 1)
    everybodys, left_out = harness.core.slow(harness.now, 9)
    assert ([one.request_id for one in everybodys], left_out) == (["b", "c", "theirs"], 0)


def test_who_comes_first_to_full_places_is_predicted_the_time_until_one_comes_free() -> None:
    harness = harness_of(max_running=1)
    harness.add(make_request("before", max_tokens=20))
    harness.run()
    harness.add(make_request("runs", max_tokens=20))
    assert why(harness, "runs").predicted_wait_s == 0.0, "all places are free"
    harness.step()
    harness.add(make_request("first"))
    harness.add(make_request("second"))
    first, second = (why(harness, name).predicted_wait_s for name in ("first", "second"))
    assert first == pytest.approx(20 * STEP_S)
    assert second == pytest.approx(40 * STEP_S)


def test_ended_requests_are_remembered_for_an_hour_and_a_bounded_number_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait_report, "MAX_ENDED", 2)
    harness = Harness(FakeExecutor(replace(CAPACITY)))
    for name in "abc":
        harness.add(make_request(name))
        harness.run()
    assert harness.core.why("a", harness.now) is None
    assert why(harness, "b").phase is Phase.ENDED
    harness.now += wait_report.MEMORY_S + 1
    assert harness.core.why("c", harness.now) is None


def test_the_labels_of_remembered_requests_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_report, "MAX_LABEL_CHARACTERS", 10)
    harness = Harness(FakeExecutor(replace(CAPACITY)))
    for name in "abc":
        harness.add(replace(make_request(name), labels={"k": "1234"}))
        harness.run()
    assert harness.core.why("a", harness.now) is None
    assert why(harness, "b").labels == why(harness, "c").labels == {"k": "1234"}
