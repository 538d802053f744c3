"""Losing an executor preempts everybody at once; whoever kills executors is found out and ends alone."""

from __future__ import annotations

from dataclasses import replace

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import EndReason, Failure
from scheduler_service.core.step import PlannedStep
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request, parts, solo

POISON = 666


def kills(plan: PlannedStep, harness: Harness) -> bool:
    """An executor dies of any step that computes the poisoned prompt."""
    owners = {harness.owner[part.cache_id][0] for part in parts(plan)}
    return any(POISON in harness.requests[name].prompt for name in owners)


def run_with_poison(harness: Harness, steps: int = 500) -> int:
    """Losses until everybody has ended."""
    losses = 0
    for _ in range(steps):
        plan = harness.plan()
        if plan is None:
            if harness.idle:
                return losses
            harness.now += 0.01
        elif kills(plan, harness):
            harness.lose()
            harness.ready()
            losses += 1
        else:
            harness.answer()
    raise AssertionError("not idle")


def test_everybody_goes_on_with_the_same_tokens() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    requests = [make_request(str(i), range(i, i + 9), n=1 + i % 3, max_tokens=60) for i in range(5)]
    for request in requests:
        harness.add(request)
    for _ in range(6):
        for _ in range(9):
            harness.step()
        harness.plan()
        harness.lose()
        assert harness.plan() is None
        harness.now += 1.0
        harness.ready()
    harness.run()
    for request in requests:
        assert solo(FakeExecutor(CAPACITY), request) == {
            i: harness.tokens[request.id, i] for i in range(request.n)
        }


def test_a_loss_changes_no_order_in_the_queue() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=1))
    for name in "abc":
        harness.add(make_request(name, max_tokens=3))
    harness.step()
    harness.lose()
    harness.ready()
    harness.run()
    assert list(harness.finished) == [("a", 0), ("b", 0), ("c", 0)]


def test_nothing_is_released_of_an_executor_that_is_gone() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a"))
    harness.add(make_request("b"))
    harness.step()
    harness.cancel("b")
    harness.lose()
    harness.ready()
    plan = harness.plan()
    assert plan is not None
    assert plan.releases == ()
    assert plan.openings[0].tokens == (1, 2, 3, *harness.tokens["a", 0])
    assert plan.openings[0].prompt_length == 3


def test_the_poison_alone_fails_and_with_the_third_loss() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    requests = [make_request(str(i), range(i, i + 9), n=1 + i % 2, max_tokens=9) for i in range(6)]
    for request in requests[:3]:
        harness.add(request)
    harness.add(make_request("poison", [POISON, 1], n=2))
    for request in requests[3:]:
        harness.add(request)
    assert run_with_poison(harness) == 3
    assert list(harness.failed) == ["poison"]
    assert harness.failed["poison"].failure is Failure.POISON
    for request in requests:
        expected = solo(FakeExecutor(CAPACITY), request)
        assert {i: harness.tokens[request.id, i] for i in range(request.n)} == expected


def test_isolated_sequences_run_alone_until_they_have_a_new_token() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    for name in "ab":
        harness.add(make_request(name, max_tokens=5))
    for _ in range(2):
        harness.plan()
        harness.lose()
        harness.ready()
    harness.add(make_request("c"))
    steps = []
    for _ in range(3):
        plan = harness.plan()
        assert plan is not None
        steps.append([harness.owner[part.cache_id][0] for part in parts(plan)])
        harness.answer()
    assert steps == [["a"], ["b"], ["a", "b", "c"]]
    harness.run()
    assert not harness.failed


def test_losses_with_tokens_in_between_isolate_no_sequence() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", max_tokens=40))
    for _ in range(10):
        harness.step()  # a new token
        harness.plan()
        harness.lose()
        harness.ready()
    harness.run()
    assert ("a", 0) in harness.finished


def test_who_was_in_no_unanswered_step_is_not_blamed() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", max_tokens=40))
    for _ in range(5):
        harness.lose()
        harness.ready()
    harness.run()
    assert not harness.failed


def test_an_isolated_sequence_gets_its_pages_from_the_others() -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=6)))
    harness.add(make_request("isolated", range(16), max_tokens=4))
    harness.plan()
    harness.lose()
    harness.ready()
    harness.plan()
    harness.lose()
    harness.add(make_request("urgent", range(16), max_tokens=6, priority=9))
    harness.ready()
    harness.run()
    assert not harness.failed
    assert set(harness.finished) == {("isolated", 0), ("urgent", 0)}


def test_another_executor_may_be_smaller() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("big", range(15), max_tokens=30))
    harness.add(make_request("open", range(10), max_tokens=None))
    harness.add(make_request("long", range(10), max_tokens=None))
    harness.add(make_request("small", range(10), max_tokens=10))
    for _ in range(8):
        harness.step()
    harness.lose()
    harness.executor = FakeExecutor(replace(CAPACITY, total_pages=5))
    harness.ready()
    assert harness.failed["big"].failure is Failure.REFUSED
    assert "max_tokens" in harness.failed["big"].message
    harness.run()
    assert len(harness.tokens["open", 0]) == 10  # what fits now
    assert len(harness.tokens["small", 0]) == 10
    assert harness.finished["open", 0].reason is EndReason.LENGTH


def test_what_already_has_more_than_fits_now_ends_at_its_length() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", range(10), max_tokens=None))
    for _ in range(12):
        harness.step()
    harness.lose()
    harness.executor = FakeExecutor(replace(CAPACITY, total_pages=5))
    harness.ready()
    assert harness.finished["a", 0].reason is EndReason.LENGTH
