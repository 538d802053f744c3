"""Requests that are refused before anything is kept of them, and the errors that they get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import IdInUse, NeverFits, NoRoom, NotReady
from scheduler_service.core.events import EndReason
from scheduler_service.core.request import Request
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request

SMALL = replace(CAPACITY, total_pages=4)  # of 4 tokens


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (make_request("a", ()), "prompt"),
        (make_request("a", range(16)), "prompt"),
        (make_request("a", range(16), max_tokens=None), "prompt"),
        (make_request("a", range(10), max_tokens=7), "max_tokens"),
        (make_request("a", max_tokens=0), "max_tokens"),
        (make_request("a", max_tokens=10**9), "max_tokens"),
        (make_request("a", n=0), "n"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_fields_name(request_: Request, field: str) -> None:
    harness = Harness(FakeExecutor(SMALL))
    with pytest.raises(NeverFits) as refused:
        harness.add(request_)
    assert refused.value.field == field
    assert refused.value.message
    assert not harness.core.live("a")
    assert harness.plan() is None
    assert harness.core.snapshot().counters.refused == 1


def test_what_just_fits_runs_to_its_end() -> None:
    harness = Harness(FakeExecutor(SMALL))
    harness.add(make_request("a", range(10), max_tokens=6))
    harness.run()
    assert len(harness.tokens["a", 0]) == 6


def test_unset_max_tokens_means_what_fits() -> None:
    harness = Harness(FakeExecutor(SMALL))
    assert harness.core.max_request_tokens == 16
    harness.add(make_request("a", range(10), max_tokens=None))
    harness.run()
    assert len(harness.tokens["a", 0]) == 6
    assert harness.finished["a", 0].reason is EndReason.LENGTH


def test_a_live_duplicate_is_refused_and_a_later_one_is_not() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a"))
    with pytest.raises(IdInUse):
        harness.core.add(make_request("a"), 0.0)
    harness.run()
    harness.core.add(make_request("a"), harness.now)


def test_a_replacing_request_is_counted_once_and_a_refused_one_replaces_nothing() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_queued_requests=1))
    harness.add(make_request("a"))
    harness.core.add(make_request("a"), 0.0, replaces=True)
    harness.core.check_integrity()
    snapshot = harness.core.snapshot()
    assert (snapshot.waiting, snapshot.counters.cancelled) == (1, 1)
    with pytest.raises(NeverFits):
        harness.core.add(make_request("a", n=0), 0.0, replaces=True)
    assert harness.core.live("a")
    harness.run()
    assert harness.finished["a", 0]


def test_requests_are_refused_before_the_first_executor_has_told_its_limits() -> None:
    harness = Harness(FakeExecutor(CAPACITY), connect=False)
    with pytest.raises(NotReady):
        harness.add(make_request("a"))
    harness.ready()
    harness.add(make_request("a"))


def test_requests_wait_for_an_executor_that_was_there_before() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.lose()
    harness.add(make_request("a"))
    assert harness.plan() is None
    harness.ready()
    harness.run()
    assert ("a", 0) in harness.finished


def test_the_queue_is_bounded_in_requests() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_queued_requests=2))
    harness.add(make_request("a"))
    harness.add(make_request("b"))
    with pytest.raises(NoRoom) as full:
        harness.add(make_request("c"))
    assert 0.1 <= full.value.retry_after_s <= 30
    harness.plan()  # both have started: the queue is empty
    harness.add(make_request("c"))


def test_the_queue_is_bounded_in_tokens() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_queued_tokens=20))
    harness.add(make_request("a", range(12)))
    with pytest.raises(NoRoom):
        harness.add(make_request("b", range(9)))
    harness.add(make_request("c", range(8)))
    with pytest.raises(NeverFits):
        harness.add(make_request("d", range(21)))
    harness.cancel("a")
    harness.add(make_request("b", range(9)))


def test_what_was_started_is_never_in_the_queues_way() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_queued_requests=1))
    harness.add(make_request("a"))
    harness.plan()
    harness.add(make_request("b"))
    harness.answer()
    harness.step()
    harness.lose()  # both wait again, and neither counts
    harness.add(make_request("c"))


@pytest.mark.parametrize("field", ["max_running", "max_draft_tokens", "max_queued_tokens"])
def test_a_configuration_that_can_do_nothing_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        CoreConfig(**{field: 0})
