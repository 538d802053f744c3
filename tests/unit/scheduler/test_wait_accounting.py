"""Each waiting sequence has one reason at any time, and its sums are the time that it waited."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.states import SequenceState
from scheduler_service.core.step import PlannedStep
from scheduler_service.core.step_log import StepLog
from scheduler_service.core.waiting.course import MAX_STAYS, Course, Stage
from scheduler_service.core.waiting.reasons import WaitReason, WaitSums
from scheduler_service.core.waiting.wait import MIN_PRIORITIES, AccountWaits
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request
from tests.unit.scheduler.schedules import Schedule, schedules
from tests.unit.scheduler.test_random_schedules import Run

WAITING = (SequenceState.QUEUED, SequenceState.HELD)
OWN_RESOURCES = {
    "pages": {WaitReason.PAGES, WaitReason.PAGES_IN_FLIGHT, WaitReason.RUNNING_PAGES},
    "seats": {WaitReason.SEATS, WaitReason.OTHER_STEP_SHARE},  # a share is one of seats, too
    "tokens": {WaitReason.STEP_BUDGET, WaitReason.OTHER_PROMPT},
    "bytes": {WaitReason.ANSWER_BYTES},
    "slots": {WaitReason.ADAPTER_SLOT},
}
"""The reasons that more of a resource can end at once."""


def more_of(resource: str, limits: JointLimits) -> JointLimits:
    """Limits with plenty of a resource; not of pages, which are no limit."""
    match resource:
        case "seats":
            return replace(limits, max_sequences=limits.max_sequences + 100)
        case "tokens":
            plenty = limits.step_tokens + 10_000
            return replace(limits, step_tokens=plenty, step_budget_s=1000.0)
        case "bytes":
            return replace(limits, output_bytes=limits.output_bytes + (1 << 30))
        case "slots":
            return replace(limits, adapter_slots=limits.adapter_slots + 100)
    return limits


def admitted(plan: PlannedStep | None) -> list[tuple[object, ...]]:
    """The keys of the sequences that get a cache, in no order."""
    if plan is None:
        return []
    return sorted(one.sequence.key for one in (*plan.openings, *plan.forks))  # type: ignore[attr-defined]


class Watched(Harness):
    """Adds up, by looking at each sequence whenever time passes, what the ledger is to find out without."""

    def __init__(self, *args: object, **settings: object) -> None:
        self._now = 0.0
        self.waited: dict[LiveSequence, dict[bool, dict[WaitReason, float]]] = {}
        self.planned = 0
        self.compares = True  # each plan with another one; takes a copy of the core
        super().__init__(*args, **settings)  # type: ignore[arg-type]

    @property
    def now(self) -> float:
        return self._now

    @now.setter
    def now(self, now: float) -> None:
        passed, self._now = now - self._now, now
        if passed <= 0:
            return
        waits, counts = self.core._pool.waits, Counter[WaitReason]()
        for live in self.core._registry:
            for sequence in live.sequences:
                reason = waits.reason_of(sequence)
                assert (reason is not WaitReason.NONE) == (sequence.state in WAITING), sequence.state
                if reason:
                    counts[reason] += 1
                    again = sequence.started_at is not None
                    sums = self.waited.setdefault(sequence, {}).setdefault(again, defaultdict(float))
                    sums[reason] += passed
        assert +Counter(self.core.waiting_by_reason()) == counts

    def plan(self) -> PlannedStep | None:
        """Compare with the plan of a copy that has more of another resource than the one that is lacking."""
        if not self.compares:
            return super().plan()
        self.planned += 1
        resource = list(OWN_RESOURCES)[self.planned % len(OWN_RESOURCES)]
        twin = copy.deepcopy(self.core, {id(self.core.log): StepLog()})
        plan = super().plan()
        self.compare(twin, resource, plan)
        return plan

    def compare(self, twin: StepScheduler, resource: str, plan: PlannedStep | None) -> None:
        waits, target = self.core._pool.waits, twin._target
        if plan is None or target.limits is None or waits.reason in OWN_RESOURCES[resource]:
            return
        if resource == "slots" and waits._passed:
            return  # the head's reason is another, and those that are passed by wait for slots
        if resource == "tokens" and len(target.in_flight) >= target.limits.in_flight:
            return  # whether what is queued fills a step decides whether there is a plan
        target.limits = more_of(resource, target.limits)
        if resource == "pages":
            target.free_pages += 1000
        other = twin.plan(self.now)
        if waits.head is not None:
            assert waits.head.key not in admitted(other), f"{waits.reason.name} was ended by {resource}"
        assert admitted(plan)[:1] == admitted(other)[:1], (waits.reason.name, resource)

    def judge(self) -> set[WaitReason]:
        """The ledger's sums are those that were added up here; returns the reasons that took time."""
        reasons = set()
        for sequence, by_again in self.waited.items():
            wait = sequence.wait
            for again, expected in by_again.items():
                sums = wait.again if again else wait.queued
                assert sums is not None
                in_core = {r: s for r, s in sums.times() if r > WaitReason.GRAMMAR_COMPILING}
                assert in_core == pytest.approx(expected, abs=1e-7), (sequence.key, again)
                reasons |= set(expected)
            began = sequence.live.request.arrival
            if sequence.started_at is not None:
                assert wait.queued.total == pytest.approx(sequence.started_at - began, abs=1e-7)
            self.judge_course(sequence)
        return reasons

    def judge_course(self, sequence: LiveSequence) -> None:
        """Its stays follow one another from its arrival to now, and those that wait have their reasons."""
        stays, wait = list(sequence.wait.course), sequence.wait
        assert stays[0].began == sequence.live.request.arrival
        assert stays[0].stage is Stage.QUEUE
        assert all(one.ended == next_one.began for one, next_one in pairwise(stays))
        waiting = [one for one in stays if one.stage not in (Stage.PREFILL, Stage.DECODE)]
        if len(stays) < MAX_STAYS:
            for one in waiting:
                assert sum(s for _, s in one.waits) == pytest.approx(one.ended - one.began, abs=1e-6), stays
            again = sum(one.ended - one.began for one in waiting[1:])
            assert again == pytest.approx(0.0 if wait.again is None else wait.again.total, abs=1e-6)


class WatchedRun(Run):
    harness_type = Watched


def check(schedule: Schedule) -> set[WaitReason]:
    run = WatchedRun(schedule)
    run.go()
    assert isinstance(run.harness, Watched)
    return run.harness.judge()


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_each_waiting_sequence_has_one_reason_and_its_sums_are_the_time_that_it_waited(
    schedule: Schedule,
) -> None:
    check(schedule)


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules(speculate=True))
def test_so_it_has_where_drafts_are_waited_for(schedule: Schedule) -> None:
    check(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [False, True])
def test_so_it_has_1000_times(speculate: bool) -> None:
    seen: set[WaitReason] = set()

    @settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(schedules(speculate=speculate))
    def check_one(schedule: Schedule) -> None:
        seen.update(check(schedule))

    check_one()
    print(sorted(reason.name for reason in seen))


class Behind:
    """A sequence of a priority, which adds up the time that a higher one is first."""

    def __init__(self, waits: AccountWaits, priority: int, now: float) -> None:
        self.priority, self.expected = priority, 0.0
        self.reading = waits.above(priority, now)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.floats(0.1, 9.0), st.booleans()), max_size=60), st.booleans()
)
def test_the_time_behind_higher_priorities_is_known_however_often_they_change(
    changes: list[tuple[int, float, bool]], merges: bool
) -> None:
    waits, now, behind = AccountWaits(), 0.0, list[Behind]()
    waits.first(0, now)
    first = 0
    for priority, seconds, joins in changes:
        if joins:
            behind.append(Behind(waits, priority, now))
        now += seconds
        for one in behind:
            one.expected += seconds if first > one.priority else 0.0
        first = priority
        waits.first(priority, now)
        if merges:
            waits.merge({one.priority for one in behind})
    for one in behind:
        assert waits.above(one.priority, now) - one.reading == pytest.approx(one.expected, abs=1e-6)


def test_priorities_of_the_past_take_no_memory() -> None:
    waits = AccountWaits()
    most = 0
    for priority in range(5000):
        waits.first(priority, float(priority))
        most = max(most, len(waits._by_priority))
        if waits.has_many:
            waits.merge({-1})
    assert most <= MIN_PRIORITIES + 3
    assert waits.above(-1, 5000.0) == 5000.0


def test_a_course_tells_a_preemption_from_the_loss_of_an_executor() -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=8)), CoreConfig(max_step_tokens=32))
    for name in "ab":
        harness.add(make_request(name, range(12), max_tokens=8))
    (first,), (second,) = harness.core.courses("a"), harness.core.courses("b")
    while Stage.PREEMPTED not in [one.stage for one in second]:
        harness.step()
    harness.lose()
    harness.now += 1.0
    harness.ready()
    harness.run()
    assert [one.stage.value for one in first] == [
        "queue",
        "prefill",
        "decode",
        "failover",
        "prefill",
        "decode",
    ]
    [lost] = [one for one in first if one.stage is Stage.FAILOVER]
    assert lost.waits == ((WaitReason.NO_EXECUTOR, 1.0),)
    assert [one.stage.value for one in second][:4] == ["queue", "prefill", "decode", "preempted"]
    assert list(second)[-1].stage is Stage.DECODE


def test_a_course_has_an_end_however_often_its_sequence_is_preempted() -> None:
    course = Course()
    for second in range(1000):
        course.turn(Stage.PREFILL if second % 2 else Stage.PREEMPTED, float(second))
        course.lost()
        course.waited(((WaitReason.PAGES, float(second)),))
    course.end(1000.0)
    stays = list(course)
    assert (len(stays), stays[-1].ended) == (MAX_STAYS, 1000.0)


def test_sums_leave_reasons_without_time_out() -> None:
    sums = WaitSums()
    sums.add(WaitReason.SEATS, 0.0)
    sums.add(WaitReason.PAGES, 2.0)
    sums.add(WaitReason.PAGES, 1.0)
    assert sums.times() == ((WaitReason.PAGES, 3.0),)
    assert sums.total == 3.0


def test_what_the_front_end_measured_is_a_part_of_the_wait() -> None:
    harness = Watched(FakeExecutor(CAPACITY))
    harness.now = 5.0
    phases = (
        (WaitReason.CALLERS_TURN, 1.0),
        (WaitReason.TOKENIZING, 1.5),
        (WaitReason.GRAMMAR_COMPILING, 4.0),
    )
    request: Request = make_request("a", arrival=1.0, phases=phases)
    harness.add(request)
    harness.run()
    usage = harness.finished["a", 0].usage
    assert usage.queue_s == 4.0
    assert usage.queue_waits == (
        (WaitReason.CALLERS_TURN, 0.5),
        (WaitReason.TOKENIZING, 2.5),
        (WaitReason.GRAMMAR_COMPILING, 1.0),
    )
