"""More waits for room than those of `constructed_waits`, which come about in other ways."""

from __future__ import annotations

from dataclasses import replace

from scheduler_service.core.waiting.reasons import WaitReason as R
from tests.unit.scheduler.constructed_waits import (
    LONG,
    Wait,
    cancels,
    evaluation,
    first_that,
    harness_of,
    pages,
    run_one,
    running_pages,
    scored,
    small,
)
from tests.unit.scheduler.engine_executor import EngineExecutor
from tests.unit.scheduler.harness import CAPACITY, make_request
from tests.unit.scheduler.test_wait_accounting import Watched


def places_of_the_executor() -> Wait:
    harness = harness_of(replace(CAPACITY, max_sequences=2))
    for name in "abc":
        harness.add(make_request(name, max_tokens=LONG))
    harness.step()
    harness.step()
    return Wait(harness, "c", R.SEATS, lambda: harness.stop("a", 0))


def places_that_take_all_tokens_of_a_step() -> Wait:
    harness = harness_of(max_step_tokens=3)
    for name in "abcd":
        harness.add(make_request(name, max_tokens=LONG))
    for _ in range(6):
        harness.step()
    return Wait(harness, "d", R.SEATS, lambda: harness.cancel("a"))


def place_of_a_third_completion() -> Wait:
    harness = harness_of(max_running=2)
    harness.add(make_request("a", n=3, max_tokens=LONG))
    for _ in range(3):
        harness.step()
    return Wait(harness, "a", R.SEATS, lambda: harness.stop("a", 0))


def pages_of_a_preempted_one() -> Wait:
    harness = harness_of(small())
    for name in "ab":
        harness.add(make_request(name, range(14), max_tokens=20))
    while harness.core._pool.preemptions == 0:
        harness.step()
    harness.step()
    harness.step()
    return Wait(harness, "b", R.PAGES, lambda: harness.cancel("a"))


def pages_of_a_second_completion() -> Wait:
    harness = harness_of(small(6))
    harness.add(make_request("a", range(22), max_tokens=2, n=2))
    while harness.core._pool.waits.reason is not R.PAGES:
        harness.step()
    return Wait(harness, "a", R.PAGES, lambda: harness.stop("a", 0))


def pages_of_a_stopped_one() -> Wait:
    wait = pages()
    wait.harness.stop("a", 0)
    wait.harness.plan()
    return replace(wait, reason=R.PAGES_IN_FLIGHT, end=wait.harness.answer)


def pages_that_another_identity_gives() -> Wait:
    harness = harness_of(small(16))
    for name in "ab":
        harness.add(make_request(name, range(24), max_tokens=8, identity="x"))
    harness.step()
    harness.step()
    harness.add(make_request("c", range(100, 120), identity="y"))
    harness.plan()
    return Wait(harness, "c", R.PAGES_IN_FLIGHT, harness.answer)


def running_pages_of_three() -> Wait:
    harness = harness_of(small(12))
    for name in "abc":
        harness.add(make_request(name, range(11), max_tokens=24))
    while harness.core._pool.waits.reason is not R.RUNNING_PAGES:
        harness.step()
    who = first_that(harness, R.RUNNING_PAGES)
    return Wait(harness, who, R.RUNNING_PAGES, cancels(harness, *({*"abc"} - {who})))


def running_pages_before_a_newcomer() -> Wait:
    wait = running_pages()
    wait.harness.add(make_request("c", priority=5))
    return replace(wait, who="c")


def budget_of_its_own_completions() -> Wait:
    harness = harness_of(max_step_tokens=4, max_running=3)
    harness.add(make_request("a", range(4)))
    harness.add(make_request("b", range(4)))
    harness.plan()
    return Wait(harness, "b", R.STEP_BUDGET, harness.answer)


def bytes_of_two_vectors() -> Wait:
    harness = harness_of(replace(CAPACITY, hidden_size=16, max_output_bytes=128))
    for name in "abc":
        harness.add(evaluation(name))
    harness.plan()
    return Wait(harness, "c", R.ANSWER_BYTES, harness.answer)


def bytes_of_scores() -> Wait:
    capacity = replace(CAPACITY, max_output_bytes=4 * 10)
    harness = Watched(EngineExecutor(capacity), harness_of().config)
    harness.add(scored("a", 14))
    harness.add(scored("b", 14))
    harness.plan()
    return Wait(harness, "b", R.ANSWER_BYTES, harness.answer)


def second_slot() -> Wait:
    harness = harness_of(replace(CAPACITY, max_adapter_slots=2))
    for name in "abc":
        harness.add(make_request(name, max_tokens=LONG, adapter=name.encode()))
    harness.step()
    harness.step()
    return Wait(harness, "c", R.ADAPTER_SLOT, lambda: harness.cancel("a"))


def slot_that_others_are_admitted_without() -> Wait:
    """Those of another identity start before it, and then wait for a place."""
    harness = harness_of(replace(CAPACITY, max_adapter_slots=1), max_running=2)
    run_one(harness, adapter=b"one", identity="x")
    harness.add(make_request("b", adapter=b"two", identity="y"))
    for name in "cd":
        harness.add(make_request(name, max_tokens=LONG, identity="z"))
    harness.step()
    harness.step()
    return Wait(harness, "b", R.ADAPTER_SLOT, cancels(harness, *"acd"))


ROOM_WAITS = (
    *(places_of_the_executor, places_that_take_all_tokens_of_a_step, place_of_a_third_completion),
    *(pages_of_a_preempted_one, pages_of_a_second_completion, pages_of_a_stopped_one),
    *(pages_that_another_identity_gives, running_pages_of_three, running_pages_before_a_newcomer),
    *(budget_of_its_own_completions, bytes_of_two_vectors, bytes_of_scores, second_slot),
    slot_that_others_are_admitted_without,
)
