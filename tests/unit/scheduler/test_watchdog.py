"""A planner that admits nothing although what the first waits for is there is found; a right one never is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from scheduler_service.core import watchdog
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.dispatcher import Dispatcher
from scheduler_service.core.step import PlannedStep
from scheduler_service.core.waiting.reasons import WaitReason
from tests.unit.scheduler.constructed_waits import WAITS, Wait, harness_of
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request, solo
from tests.unit.scheduler.schedules import Schedule, schedules
from tests.unit.scheduler.test_random_schedules import Run

AFTER_S = 10.0
FOUND = (
    *(WaitReason.SEATS, WaitReason.PAGES, WaitReason.PAGES_IN_FLIGHT, WaitReason.RUNNING_PAGES),
    *(WaitReason.STEP_BUDGET, WaitReason.OTHER_PROMPT, WaitReason.OTHER_STEP_SHARE, WaitReason.ANSWER_BYTES),
    *(WaitReason.DEADLINES, WaitReason.DRAFT_EXECUTOR, WaitReason.ALONE, WaitReason.NO_EXECUTOR),
)


@pytest.mark.parametrize("reason", FOUND)
def test_a_planner_that_admits_nothing_is_found_with_the_reason_that_it_records(
    reason: WaitReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = harness_of(watchdog_s=AFTER_S)

    def plan(self: Dispatcher, now: float) -> PlannedStep | None:
        first = self._pool.queue.first_sequence()
        self._pool.waits.block(first, reason if first else WaitReason.NONE)
        return None

    monkeypatch.setattr(Dispatcher, "next_step", plan)
    harness.add(make_request("a"))
    harness.now += AFTER_S / 2
    harness.plan()
    assert harness.core.fault is None, "it has not waited for long"
    harness.now += AFTER_S
    harness.plan()
    fault = harness.core.fault
    assert fault is not None
    assert fault.reason is reason
    monkeypatch.undo()
    harness.step()
    assert harness.core.fault is None, "it was admitted"


@pytest.mark.parametrize("make", WAITS)
def test_a_wait_for_what_is_lacking_is_no_fault_however_long_it_takes(
    make: Callable[[], Wait], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_S", 0.0)
    wait = make()
    wait.harness.core._watchdog._after_s = 1e-9
    wait.harness.now += 1000.0
    wait.harness.plan()
    assert wait.harness.core.fault is None


class Judged(Harness):
    """Looks at every plan, as if everything had waited for long."""

    def plan(self) -> PlannedStep | None:
        self.core._watchdog._after_s = 1e-9
        plan = super().plan()
        assert self.core.fault is None
        return plan


def test_a_step_that_is_left_out_is_no_word_of_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only place is free after a's end, while its further row is in flight: b waits for the answer."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.0)
    executor = FakeExecutor(replace(CAPACITY, short_step_s=1.0))
    last = solo(FakeExecutor(CAPACITY), make_request("a", max_tokens=20))[0][4]
    harness = Judged(executor, CoreConfig(max_running=1, max_in_flight=0, watchdog_s=AFTER_S))
    harness.add(make_request("first", max_tokens=1))
    harness.run()
    harness.add(make_request("a", max_tokens=20, stop_token_ids=frozenset({last})))
    harness.add(make_request("b"))
    left_out = 0
    while not harness.idle:
        harness.now += AFTER_S
        while harness.plan() is not None:
            pass
        left_out += bool(harness.unanswered and harness.core._pool.queue and not harness.core._pool.running)
        harness.answer()
    assert left_out


class JudgedRun(Run):
    harness_type = Judged


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_no_random_schedule_has_a_fault(schedule: Schedule) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "LOOK_S", 0.0)
        JudgedRun(schedule).go()
