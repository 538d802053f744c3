"""Whose turn is first, who is preempted for pages, which limits hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.account import Account
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.preemption import victims_for_pages
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from tests.unit.scheduler.harness import CAPACITY, make_request

LIMITS = JointLimits.of(CoreConfig(max_step_tokens=32, prefill_chunk_tokens=16), CAPACITY)


def sequence(name: str = "a", serial: int = 1, *, pages: int = 1, **fields: Any) -> LiveSequence:
    made = LiveRequest(make_request(name, **fields), Account(""), serial, 4, 0.0).sequences[0]
    made.kv = pages * LIMITS.page_size
    return made


def queue(*sequences: LiveSequence) -> SequenceQueue:
    made = SequenceQueue()
    for one in sequences:
        made.add(one)
    return made


@given(st.lists(st.tuples(st.integers(-2, 2), st.floats(0, 5)), max_size=12))
def test_the_queue_is_ordered_by_priority_then_arrival_then_adding(drawn: list[tuple[int, float]]) -> None:
    made = [sequence(str(i), i, priority=p, arrival=a) for i, (p, a) in enumerate(drawn)]
    waiting = queue(*made)
    expected = sorted(made, key=lambda s: (-s.live.request.priority, s.live.request.arrival, s.live.serial))
    assert list(waiting) == expected
    for one in made:
        assert one in waiting
        waiting.remove(one)
        assert one not in waiting


def test_the_victim_is_the_lowest_priority_and_of_those_the_youngest() -> None:
    old, young = sequence("old", 1, arrival=0.0), sequence("young", 2, arrival=1.0)
    urgent = sequence("urgent", 3, priority=5, arrival=9.0)
    running = queue(old, young, urgent)
    assert list(victims_for_pages(list(running), urgent, 1, LIMITS)) == [young]
    assert list(victims_for_pages(list(running), old, 1, LIMITS)) == [young]
    assert list(victims_for_pages(list(running), urgent, 2, LIMITS)) == [young, old]


def test_a_victim_counts_for_the_pages_that_only_it_holds() -> None:
    first, rich = sequence("first", 1), sequence("rich", 2, pages=4)
    shared = sequence("shared", 3, pages=4)
    shared.shared_tokens = 3 * LIMITS.page_size
    assert list(victims_for_pages(list(queue(first, rich)), first, 4, LIMITS)) == [rich]
    assert list(victims_for_pages(list(queue(first, rich, shared)), first, 2, LIMITS)) == [shared, rich]


def test_nobody_is_preempted_for_one_behind_or_for_itself() -> None:
    first, last = sequence("first", 1), sequence("last", 2)
    assert list(victims_for_pages(list(queue(first, last)), last, 3, LIMITS)) == []


def test_the_smaller_of_configuration_and_executor_holds() -> None:
    limits = JointLimits.of(CoreConfig(max_step_tokens=8, prefill_chunk_tokens=99, max_running=99), CAPACITY)
    assert (limits.step_tokens, limits.chunk_tokens) == (8, 8)
    assert limits.max_sequences == 8  # everybody with a cache can decode in every step
    assert JointLimits.of(CoreConfig(), CAPACITY).max_sequences == CAPACITY.max_rows
    assert limits.request_tokens == CAPACITY.context_length
    assert JointLimits.of(CoreConfig(), replace(CAPACITY, total_pages=5)).request_tokens == 20


def test_steps_are_as_long_as_the_executor_is_busy_with_unless_the_configuration_says_otherwise() -> None:
    small, large = (replace(CAPACITY, max_step_tokens=8192, tokens_to_be_busy=n) for n in (512, 2048))
    for capacity, expected in ((small, (512, 256)), (large, (2048, 1024))):
        limits = JointLimits.of(CoreConfig(), capacity)
        assert (limits.step_tokens, limits.chunk_tokens) == expected
    limits = JointLimits.of(CoreConfig(max_step_tokens=600), large)
    assert (limits.step_tokens, limits.chunk_tokens) == (600, 600)
    assert JointLimits.of(CoreConfig(prefill_chunk_tokens=64), large).chunk_tokens == 64


@given(st.integers(0, 200))
def test_pages_hold_what_they_must_and_no_page_is_idle(tokens: int) -> None:
    pages = LIMITS.pages(tokens)
    assert pages * LIMITS.page_size >= tokens > (pages - 1) * LIMITS.page_size or tokens == pages == 0
