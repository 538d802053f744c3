"""The step log has what each answered step did, in bounded memory, and is read by number."""

from __future__ import annotations

import pytest

from scheduler_service.core import step_log
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import Failure
from scheduler_service.core.step_log import FAILURES, StepEvent, StepFigures, StepLog
from scheduler_service.core.waiting.reasons import WaitReason
from tests.unit.scheduler.constructed_waits import harness_of
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, STEP_S, Harness, column, log_parts, make_request


def events(log: StepLog) -> list[tuple[str, str, int, int]]:
    """Kind, id, index and value of each."""
    return [
        (StepEvent(kind).name, part.names[number][0], index, value)
        for part in log_parts(log)
        for kind, number, index, value in zip(
            part.events.kinds, part.events.requests, part.events.indexes, part.events.values, strict=True
        )
    ]


def test_a_step_has_its_rows_tokens_times_and_why_no_further_sequence_was_admitted() -> None:
    harness = harness_of(max_running=1)
    harness.add(make_request("a", range(20), max_tokens=3))
    harness.add(make_request("b", max_tokens=1))
    harness.run()
    log = harness.core.log
    assert column(log, "prompt_rows")[:2] == [1, 1]  # 20 tokens in chunks of 16
    assert column(log, "tokens")[:4] == [16, 4, 1, 1]
    assert column(log, "decode_rows")[:4] == [0, 0, 1, 1]
    assert column(log, "taken_us")[0] == round(1e6 * STEP_S)
    assert column(log, "reasons")[:4] == [WaitReason.SEATS] * 4
    assert column(log, "waiting")[:4] == [1] * 4
    assert column(log, "running")[:4] == [1, 1, 1, 0]
    assert column(log, "free_pages")[0] == CAPACITY.total_pages
    assert events(log) == [
        ("QUEUED", "a", 0, 20),
        ("QUEUED", "b", 0, 3),
        ("ADMITTED", "a", 0, 0),
        ("ENDED", "a", 0, 3),
        ("ADMITTED", "b", 0, 0),
        ("ENDED", "b", 0, 1),
    ]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_step_ends_in_the_log_when_it_was_answered_however_many_are_in_flight(depth: int) -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_in_flight=depth))
    for name in "abc":
        harness.add(make_request(name, range(20), max_tokens=9))
    answered = []
    for number in range(20):
        while harness.plan() is not None:
            pass
        if harness.unanswered:
            harness.now += number % 4  # paces differ
            harness.answer()
            answered.append(harness.now)
    log, [part] = harness.core.log, log_parts(harness.core.log)
    both = zip(column(log, "started_us"), column(log, "taken_us"), strict=True)
    ends = [part.started_at + (began + took) / 1e6 for began, took in both]
    assert ends == pytest.approx(answered, abs=1e-5)


def test_what_a_request_waited_for_before_it_was_queued_is_noted_unless_it_was_less_than_a_millisecond() -> (
    None
):
    harness = harness_of()
    harness.now = 5.0
    turn, tokens, grammar = WaitReason.CALLERS_TURN, WaitReason.TOKENIZING, WaitReason.GRAMMAR_COMPILING
    phases = ((turn, 1.0), (tokens, 1.0005), (grammar, 1.5), (tokens, 4.0))
    harness.add(make_request("a", range(9), arrival=1.0, phases=phases))
    harness.run()
    assert events(harness.core.log)[:4] == [
        ("TOKENIZING", "a", 0, 499_500),
        ("GRAMMAR_COMPILING", "a", 0, 2_500_000),
        ("TOKENIZING", "a", 0, 1_000_000),
        ("QUEUED", "a", 0, 9),
    ]


def test_whoever_loses_its_cache_with_its_executor_is_resumed() -> None:
    harness = harness_of()
    harness.add(make_request("a", max_tokens=9))
    harness.step()
    harness.lose()
    harness.ready()
    harness.run()
    kinds = [kind for kind, *_ in events(harness.core.log)]
    assert kinds == ["QUEUED", "ADMITTED", "PREEMPTED", "RESUMED", "ENDED"]


def test_a_cancelled_request_has_its_failure_and_a_preempted_one_is_resumed() -> None:
    harness = harness_of()
    harness.add(make_request("a", max_tokens=9))
    harness.step()
    harness.core._pool.preempt(harness.core._pool.running[0])
    harness.step()
    harness.step()
    harness.cancel("a")
    harness.run()
    kinds = [(kind, value) for kind, _, _, value in events(harness.core.log)]
    cancelled = FAILURES.index(Failure.CANCELLED)
    assert kinds == [("QUEUED", 3), ("ADMITTED", 0), ("PREEMPTED", 3), ("RESUMED", 0), ("REFUSED", cancelled)]


def filled(steps: int, events_a_step: int = 0) -> StepLog:
    """One step a second, each with so many requests that came."""
    log = StepLog()
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a"))
    [live] = harness.core._registry
    for step in range(steps):
        for _ in range(events_a_step):
            log.note(StepEvent.QUEUED, live, 0, 1)
        log.answered(StepFigures(0.0, 0.0, 5, WaitReason.NONE), float(step), 0.5, 0, 0, 0)
    return log


def test_the_log_is_read_in_parts_from_any_step_that_it_has() -> None:
    log = filled(600)
    assert [(part.first_step, len(part)) for part in log_parts(log)] == [(1, 256), (257, 256), (513, 88)]
    assert [part.first_step for part in log_parts(log, 590, 4)] == [590, 594, 598]
    part = log.read(590, 4)
    assert part is not None
    assert part.started_at == 589.0
    assert (log.since(589.0), log.since(588.5), log.since(1e9), log.since(-1.0)) == (590, 590, 601, 1)


def test_old_steps_and_those_beyond_the_bound_of_memory_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    log = filled(4500)
    assert log.end == 4501
    assert 3600 <= len(log) <= 3600 + 2 * step_log.BLOCK_STEPS
    part = log.read(1, 10)
    assert part is not None
    assert part.first_step == log.first, "what is kept no more is left out"
    monkeypatch.setattr(step_log, "MAX_BYTES", 100_000)
    log = filled(3000, events_a_step=3)
    assert log.size <= 100_000 + step_log.BLOCK_STEPS * 200
    assert len(log) >= step_log.BLOCK_STEPS


def test_events_of_a_step_and_of_a_part_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "MAX_EVENTS", 10)
    log = filled(20, events_a_step=4)
    assert [len(part) for part in log_parts(log)] == [2] * 10
    log = filled(2, events_a_step=99)
    assert column(log, "event_counts") == [10, 10]
