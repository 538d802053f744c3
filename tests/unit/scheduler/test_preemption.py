"""What happens when pages run out, and when the executor refuses a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import Failure
from scheduler_service.core.request import Request
from scheduler_service.core.step import Code, RefusalCause, RowAnswer, StepAnswer
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request, parts, solo


def expect_solo(harness: Harness, *requests: Request) -> None:
    for request in requests:
        expected = solo(FakeExecutor(CAPACITY), request)
        assert {i: harness.tokens[request.id, i] for i in range(request.n)} == expected


def test_the_youngest_gives_way_and_continues_exactly() -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=7)))
    old = make_request("old", range(4), max_tokens=20)
    young = make_request("young", range(9, 13), max_tokens=20)
    harness.add(old)
    harness.add(young)
    harness.run()
    expect_solo(harness, old, young)
    assert harness.finished["old", 0].usage.preemptions == 0
    assert harness.finished["young", 0].usage.preemptions > 0
    assert harness.core.snapshot().counters.preemptions == harness.finished["young", 0].usage.preemptions


def test_priority_goes_before_age() -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=7)))
    harness.add(make_request("old", range(4), max_tokens=20))
    harness.add(make_request("urgent", range(9, 13), max_tokens=20, priority=1))
    harness.run()
    assert harness.finished["urgent", 0].usage.preemptions == 0
    assert harness.finished["old", 0].usage.preemptions > 0


def test_one_that_waits_for_pages_blocks_no_decode_and_is_not_overtaken() -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=8)))
    harness.add(make_request("running", range(4), max_tokens=12))
    harness.step()
    harness.add(make_request("large", range(28), max_tokens=2))
    harness.add(make_request("small", range(2), max_tokens=2))
    before = len(harness.tokens["running", 0])
    for _ in range(5):
        harness.step()
    assert len(harness.tokens["running", 0]) == before + 5
    harness.run()
    assert list(harness.finished) == [("running", 0), ("large", 0), ("small", 0)]


def test_a_pool_of_exactly_one_request_serves_many() -> None:
    harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=5)))
    requests = [make_request(str(i), range(i, i + 11), n=1 + i % 3, max_tokens=9) for i in range(5)]
    for request in requests:
        harness.add(request)
    harness.run()
    expect_solo(harness, *requests)


def test_decodes_go_on_while_a_long_prompt_is_prefilled_in_chunks() -> None:
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig(max_step_tokens=8, prefill_chunk_tokens=6))
    harness.add(make_request("running", max_tokens=20))
    harness.step()
    harness.add(make_request("long", range(40), max_tokens=2))
    limits = []
    for _ in range(7):
        plan = harness.plan()
        assert plan is not None
        limits += [part.limit for part in parts(plan)]
        harness.answer()
    assert limits == [0, 6] * 6 + [0, 4]
    assert len(harness.tokens["running", 0]) == 8
    harness.run()


@pytest.mark.parametrize("code", [Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.ALREADY_EXISTS])
def test_a_stale_view_is_mended_by_a_new_cache(code: Code) -> None:
    fake = FakeExecutor(CAPACITY)
    harness = Harness(fake)
    request = make_request("a", max_tokens=6)
    harness.add(request)
    harness.step()
    (cache_id,) = fake.caches
    fake.refuse[cache_id] = code
    harness.run()
    expect_solo(harness, request)
    assert cache_id not in fake.caches


def test_a_view_that_stays_stale_is_given_up() -> None:
    fake = FakeExecutor(CAPACITY)
    harness = Harness(fake, CoreConfig(max_refusals=3))
    harness.add(make_request("a"))
    fake.refuse = dict.fromkeys(range(1, 100), Code.NOT_FOUND)
    harness.run()
    assert harness.failed["a"].failure is Failure.REFUSED
    assert len(fake.refuse) == 99 - 4


@pytest.mark.parametrize(
    ("code", "failure"), [(Code.INTERNAL, Failure.NOT_FINITE), (Code.INVALID_ARGUMENT, Failure.REFUSED)]
)
def test_a_bad_row_ends_its_request_alone(code: Code, failure: Failure) -> None:
    fake = FakeExecutor(CAPACITY)
    harness = Harness(fake)
    good = make_request("good", range(5), max_tokens=6)
    harness.add(make_request("bad", n=3, max_tokens=6))
    harness.add(good)
    fake.refuse[4] = code  # of the forks
    harness.run()
    assert harness.failed["bad"].failure is failure
    assert harness.failed["bad"].message == "as the test asked"
    expect_solo(harness, good)


def test_pages_that_another_client_holds_are_waited_for() -> None:
    fake = FakeExecutor(replace(CAPACITY, total_pages=6))
    harness = Harness(fake)
    requests = [make_request("a", range(8), max_tokens=12), make_request("b", range(8), max_tokens=12)]
    for request in requests:
        harness.add(request)
    for _ in range(3):
        harness.step()
    taken, fake.free = fake.free, 0
    fake.capacity = replace(fake.capacity, total_pages=fake.capacity.total_pages - taken)
    for _ in range(40):
        harness.step()
    assert not harness.failed
    fake.free += taken
    fake.capacity = replace(fake.capacity, total_pages=fake.capacity.total_pages + taken)
    harness.run()
    expect_solo(harness, *requests)


def test_a_draining_executor_gets_no_openings_at_full_speed() -> None:
    fake = FakeExecutor(CAPACITY)
    harness = Harness(fake)
    harness.add(make_request("a"))
    fake.refuse = dict.fromkeys(range(1, 4), Code.UNAVAILABLE)
    harness.step()
    harness.step()  # releases
    assert harness.plan() is None
    assert harness.core.next_wakeup(harness.now) is not None
    harness.run()
    assert ("a", 0) in harness.finished


def test_an_executor_that_answers_nonsense_is_not_believed() -> None:
    fake = FakeExecutor(CAPACITY)
    harness = Harness(fake)
    request = make_request("a", max_tokens=6)
    harness.add(request)
    harness.step()
    plan = harness.plan()
    assert plan is not None
    result = fake.execute(plan)
    result.rows[0].kv_length += 1
    harness.answer(result)
    harness.run()
    expect_solo(harness, request)


def test_the_same_events_make_the_same_plans() -> None:
    def plans() -> list[object]:
        harness = Harness(FakeExecutor(replace(CAPACITY, total_pages=9)))
        made: list[object] = []
        for i in range(8):
            harness.add(make_request(str(i), range(i, i + 9), n=1 + i % 3, max_tokens=9, priority=i % 2))
        for _ in range(300):
            made.append(harness.plan())
            if harness.unanswered:
                harness.answer()
        return made

    assert plans() == plans()


def test_a_refused_opening_waits_and_is_no_preemption() -> None:
    fake = FakeExecutor(CAPACITY)
    harness = Harness(fake)
    harness.add(make_request("a"))
    fake.refuse[1] = Code.RESOURCE_EXHAUSTED
    harness.step()
    assert harness.core.snapshot().waiting == 1
    harness.run()
    assert fake.used_ids == {2}
    assert harness.finished["a", 0].usage.preemptions == 0


def test_what_crosses_once_crosses_with_the_opening_and_the_fork() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    stops: dict[str, Any] = {"eos_token_ids": frozenset({9}), "stop_token_ids": frozenset({8})}
    harness.add(make_request("a", n=2, max_tokens=4, salt=b"tenant", min_tokens=4, **stops))
    plan = harness.plan()
    assert plan is not None
    (opening,) = plan.openings
    assert opening.sampling == harness.requests["a"].sampling
    assert (opening.salt, opening.stop_token_ids, opening.min_tokens) == (b"tenant", (8, 9), 4)
    assert (opening.tokens, opening.prompt_length) == ((1, 2, 3), 3)
    harness.answer()
    plan = harness.plan()
    assert plan is not None
    (fork,) = plan.forks
    assert (fork.stop_token_ids, fork.min_tokens) == ((8, 9), 4)
    assert fork.sampling == harness.requests["a"].sampling.with_seed(fork.sampling.seed)


def test_pages_promised_to_the_step_in_flight_and_gone_since_are_not_counted_below_none() -> None:
    config = CoreConfig(max_step_tokens=32, prefill_chunk_tokens=8, max_in_flight=2)
    harness = Harness(FakeExecutor(CAPACITY), config)
    harness.add(make_request("a", range(24)))
    first = harness.plan()
    harness.add(make_request("b", range(24)))
    assert first is not None
    assert harness.plan() is not None  # seven pages are promised to it
    harness.answer(StepAnswer(first.number, [RowAnswer(8)], [], free_pages=2, evictable_pages=0))
    plan = harness.plan()
    assert plan is not None
    assert (plan.rows, len(plan.releases)) == ((), 1)  # the younger one gives way


def test_a_row_whose_grammar_has_not_read_its_output_is_sent_again_and_nobody_gives_way() -> None:
    executor = FakeExecutor(CAPACITY)
    harness = Harness(executor)
    first, second = make_request("first", range(4)), make_request("second", range(9, 13))
    harness.add(first)
    harness.add(second)
    harness.step()
    plan = harness.plan()
    assert plan is not None
    slow = plan.rows[0].cache_id
    for _ in range(3):
        executor.refuse[slow] = Code.RESOURCE_EXHAUSTED
        result = executor.execute(plan)
        result.rows[0].cause = RefusalCause.GRAMMAR_BEHIND
        harness.answer(result)
        harness.add(make_request(f"third at {harness.now}"))
        plan = harness.plan()
        assert plan is not None
        assert plan.rows[0].cache_id == slow
        assert len(plan.openings) == 1, "it is not short of anything: others are opened"
    harness.answer()
    harness.run()
    expect_solo(harness, first, second)
    assert harness.core.snapshot().counters.preemptions == 0


def test_an_opening_whose_grammar_has_not_read_its_output_is_tried_again_and_others_go_on() -> None:
    """The first attempt takes its part of the step's tokens, the others one token."""
    executor = FakeExecutor(CAPACITY)
    harness = Harness(executor, CoreConfig(max_step_tokens=16, prefill_chunk_tokens=16))
    request = make_request("slow", range(20))
    harness.add(request)
    limits: list[list[int]] = []
    for _ in range(3):
        while (plan := harness.plan()) is None or not plan.openings:
            if plan is not None:
                harness.answer()
            harness.now = harness.core.next_wakeup(harness.now) or harness.now
        limits.append([opening.limit for opening in plan.openings])
        harness.add(make_request(f"other at {harness.now}", range(9)))
        executor.refuse[plan.openings[0].cache_id] = Code.RESOURCE_EXHAUSTED
        result = executor.execute(plan)
        result.rows[0].cause = RefusalCause.GRAMMAR_BEHIND
        harness.answer(result)
    harness.run()
    assert limits == [[16], [1, 9], [1, 9]]
    expect_solo(harness, request)
    assert harness.finished["slow", 0].usage.preemptions == 0
