"""Steps in flight: a sequence's next row is on its way before the last one is answered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import EndReason
from scheduler_service.core.request import DraftingWish, DraftSource
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import Code, PlannedStep
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request, solo


def ahead(depth: int = 2) -> Harness:
    """A harness with so many steps in flight."""
    return Harness(FakeExecutor(CAPACITY), CoreConfig(max_in_flight=depth))


def sent(harness: Harness) -> list[PlannedStep]:
    """Send all that there is to send."""
    plans = []
    while (plan := harness.plan()) is not None:
        plans.append(plan)
    return plans


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_steps_are_in_flight_as_there_may_be(depth: int) -> None:
    harness = ahead(depth)
    harness.add(make_request("a", max_tokens=20))
    sent(harness)
    harness.answer()
    lengths = [row.kv_length for plan in sent(harness) for row in plan.rows]
    assert lengths == [3 + i for i in range(depth)]
    harness.run()
    assert harness.tokens["a", 0] == solo(FakeExecutor(CAPACITY), harness.requests["a"])[0]


@pytest.mark.parametrize(
    ("to_be_busy", "configured", "step_s", "depth"),
    [(2, 0, 0.0019, 3), (2, 0, 0.0021, 2), (2, 2, 0.0019, 2), (1, 0, 0.0019, 1)],
)
def test_a_third_step_is_in_flight_where_steps_take_less_than_2_ms(
    to_be_busy: int, configured: int, step_s: float, depth: int
) -> None:
    executor = FakeExecutor(replace(CAPACITY, steps_to_be_busy=to_be_busy))
    core = StepScheduler(CoreConfig(max_in_flight=configured))
    core.executor_ready(executor.capacity, 0.0)
    core.add(make_request("a", max_tokens=20), 0.0)
    unanswered: list[PlannedStep] = []
    for _ in range(4):
        while (plan := core.plan(0.0)) is not None:
            unanswered.append(plan)
        in_flight = len(unanswered)
        core.apply(replace(executor.execute(unanswered.pop(0)), compute_s=step_s), 0.0)
    assert in_flight == depth


def test_nobody_waits_for_the_length_of_an_opening() -> None:
    harness = ahead()
    harness.add(make_request("a"))
    assert len(sent(harness)) == 1


def test_nothing_is_computed_beyond_the_last_token() -> None:
    harness = ahead(4)
    harness.add(make_request("a", max_tokens=3))
    steps = 0
    while not harness.idle:
        steps += sum(bool(plan.rows or plan.openings) for plan in sent(harness))
        harness.answer()
    assert steps == 3


def test_an_end_that_is_known_late_costs_one_row() -> None:
    request = make_request("a", max_tokens=20)
    output = solo(FakeExecutor(CAPACITY), request)[0]
    harness = ahead()
    harness.add(make_request("a", max_tokens=20, stop_token_ids=frozenset({output[4]})))
    rows = 0
    while not harness.idle:
        rows += sum(len(plan.rows) for plan in sent(harness))
        harness.answer()
    end = harness.finished["a", 0]
    assert harness.tokens["a", 0] == output[:5]
    assert (end.reason, end.matched_id) == (EndReason.STOP_TOKEN, output[4])
    assert rows == 5  # four decodes, and the one that was on its way


def test_what_is_cancelled_late_costs_what_is_in_flight() -> None:
    harness = ahead()
    harness.add(make_request("a", max_tokens=20))
    sent(harness)
    harness.answer()
    sent(harness)
    harness.cancel("a")
    while not harness.idle:
        assert all(not plan.rows for plan in sent(harness))
        harness.answer()
    harness.executor.check()


def test_a_row_that_was_sent_after_one_that_is_refused_counts_for_nothing() -> None:
    executor = FakeExecutor(CAPACITY)
    harness = Harness(executor, CoreConfig(max_in_flight=3))
    harness.add(make_request("a", max_tokens=12))
    harness.add(make_request("b", max_tokens=12))
    sent(harness)
    harness.answer()
    executor.refuse[sent(harness)[0].rows[0].cache_id] = Code.RESOURCE_EXHAUSTED
    harness.run()
    for name in "ab":
        assert harness.tokens[name, 0] == solo(FakeExecutor(CAPACITY), harness.requests[name])[0]
    assert harness.finished["a", 0].usage.preemptions == 0
    assert harness.finished["b", 0].usage.preemptions == 1  # the youngest makes room


@pytest.mark.parametrize("length", [None, 4])
def test_drafts_wait_for_the_answer_and_do_without_it_when_there_are_none(length: int | None) -> None:
    harness = ahead()
    speculation = DraftingWish(frozenset({DraftSource.NGRAM}), length)
    harness.add(make_request("a", range(10, 20), max_tokens=40, speculation=speculation))
    depths = []
    while not harness.idle:
        sent(harness)
        depths.append(len(harness.unanswered))
        harness.answer()
    assert harness.tokens["a", 0] == solo(FakeExecutor(CAPACITY), harness.requests["a"])[0]
    assert (max(depths) == 2) is (length is None)  # who fixed a length wants it at every step
