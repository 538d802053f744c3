"""A beginning that several prompts share is computed once, also when they come at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core import prompt_prefixes
from scheduler_service.core.account import Account
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.planner import MAX_HELD
from scheduler_service.core.prompt_prefixes import MIN_AWAITED_TOKENS, PromptPrefixes
from scheduler_service.core.request import Request
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.step import Capacity, PlannedStep
from scheduler_service.core.waiting.reasons import WaitReason
from tests.unit.scheduler.engine_executor import ADAPTERS, EngineExecutor, oracle
from tests.unit.scheduler.harness import Harness, make_request

PAGE = 16
SHARED = tuple(number % 37 for number in range(160))  # tokens: ten pages
ROOM = Capacity(256, PAGE, 512, 16, 16, 512, max_adapter_slots=4)
CONFIG = CoreConfig(max_step_tokens=256, prefill_chunk_tokens=64)


def harness(capacity: Capacity = ROOM) -> Harness:
    return Harness(EngineExecutor(capacity, oracle(capacity.context_length)), CONFIG)


def ask(name: str, *own: int, shared: Sequence[int] = SHARED, **other: Any) -> Request:
    return make_request(name, (*shared, *(own or (40,))), **other)


def opened(plan: PlannedStep | None, run: Harness) -> list[str]:
    """The requests that a step opens caches for."""
    return [] if plan is None else [run.owner[one.cache_id][0] for one in plan.openings]


def cached(run: Harness, *names: str) -> list[int]:
    return [run.finished[name, 0].usage.cached_tokens for name in names]


def test_prompts_that_come_together_have_their_beginning_computed_once() -> None:
    run = harness()
    names = ["a", "b", "c"]
    for number, name in enumerate(names):
        run.add(ask(name, number))
    assert opened(run.plan(), run) == ["a"]
    assert run.core.waiting_by_reason()[WaitReason.PREFIX] == 2
    run.answer()
    assert opened(run.plan(), run) == []  # its prompt takes three steps
    run.answer()
    run.step()
    assert sorted(opened(run.plan(), run)) == ["b", "c"]
    run.answer()
    run.run()
    assert cached(run, *names) == [0, 160, 160]
    assert run.core.snapshot().counters.prefilled_tokens == 161 + 1 + 1


def test_what_was_computed_before_is_not_waited_for() -> None:
    run = harness()
    run.add(ask("before"))
    run.run()
    run.add(ask("a", 41))
    run.add(ask("b", 42))
    assert sorted(opened(run.plan(), run)) == ["a", "b"]
    run.answer()
    run.run()
    assert cached(run, "a", "b") == [160, 160]


@pytest.mark.parametrize(
    "other",
    [
        {"salt": b"another"},
        {"adapter": ADAPTERS[0]},
        {"shared": SHARED[: MIN_AWAITED_TOKENS - PAGE]},
        {"shared": (9, *SHARED[1:])},
        {"prompt_logprobs": 0},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_can_not_come_from_anothers_computing_is_not_waited_for(other: dict[str, Any]) -> None:
    run = harness()
    run.add(ask("a", 41))
    run.add(ask("b", 42, **other))
    assert sorted(opened(run.plan(), run)) == ["a", "b"]
    run.answer()
    run.run()


def test_nobody_waits_for_a_prompt_that_is_mostly_its_own() -> None:
    run = harness()
    run.add(ask("a", *(number % 11 for number in range(162))))
    run.add(ask("b", 42))
    assert sorted(opened(run.plan(), run)) == ["a", "b"]
    run.answer()
    run.run()


@pytest.mark.parametrize("end", ["cancelled", "lost", "preempted"])
def test_who_waits_goes_on_when_the_computing_ends_early(end: str) -> None:
    run = harness()
    run.add(ask("a", 41))
    run.add(ask("b", 42))
    assert opened(run.plan(), run) == ["a"]
    if end == "lost":
        run.lose()
        run.ready()
    else:
        run.answer()
        if end == "cancelled":
            run.cancel("a")
        else:
            pool = run.core._pool
            pool.preempt(pool.last_in_turn())
            run.core.check_integrity()
    assert WaitReason.PREFIX not in {one for one, count in run.core.waiting_by_reason().items() if count}
    run.run()
    assert ("b", 0) in run.finished


def test_all_of_a_long_queue_wait_and_a_plan_holds_back_only_so_many() -> None:
    run = harness(Capacity(64, PAGE, 512, 4, 4, 512))
    count = MAX_HELD + 20
    for number in range(count):
        run.add(ask(str(number), number % 40, number // 40, max_tokens=1))
    assert opened(run.plan(), run) == ["0"]
    assert run.core._pool.held == MAX_HELD
    assert run.core.waiting_by_reason()[WaitReason.PREFIX] == MAX_HELD + 1  # and those behind that one
    run.answer()
    assert opened(run.plan(), run) == []
    assert run.core._pool.held == count - 1
    run.answer()
    run.run()
    assert sorted(cached(run, *map(str, range(count)))) == [0, *[160] * (count - 1)]


def test_an_identity_that_was_served_more_keeps_nobody_waiting() -> None:
    run = harness()
    run.add(make_request("much", (number % 7 for number in range(100)), identity="greedy", max_tokens=40))
    run.step()
    run.add(ask("a", 41, identity="greedy"))
    run.step()
    run.add(ask("b", 42, identity="polite"))
    assert "b" in opened(run.plan(), run)
    run.answer()
    run.run()


def test_who_waited_is_told_for_how_long() -> None:
    run = harness()
    run.add(ask("a", 41))
    run.add(ask("b", 42))
    run.run()
    assert dict(run.finished["b", 0].usage.queue_waits)[WaitReason.PREFIX] > 0
    assert WaitReason.PREFIX not in dict(run.finished["a", 0].usage.queue_waits)


def _sequence(tokens: Sequence[int], cache_id: int) -> LiveSequence:
    live = LiveRequest(make_request(str(cache_id), tokens), Account(""), cache_id, 4, 0.0)
    live.sequences[0].cache_id = cache_id
    return live.sequences[0]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_one_with_most_in_common_is_found_and_memory_is_bounded(data: st.DataObject) -> None:
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=12)
    )
    ends = data.draw(st.lists(st.sampled_from([None, True, False]), min_size=12, max_size=12))
    asked = _sequence(data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=8)), 99)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(prompt_prefixes, "MIN_AWAITED_TOKENS", 1)
        patches.setattr(prompt_prefixes, "MAX_PROMPTS", 3)
        known, computing = PromptPrefixes(), {}
        for number, tokens in enumerate(prompts):
            sequence = _sequence(tokens, number + 1)
            known.begins(sequence)
            if (end := ends[number]) is None:
                computing[number + 1] = sequence
            else:
                known.ends(sequence, computed=end)
            known.check_integrity(set(computing))
        found = known.awaited(asked, 1)
        if found is not None:
            leader, tokens_in_common = found
            usable = len(asked.tokens) - 1
            assert leader.cache_id in computing
            most = max(_common(asked, one) for one in computing.values())
            assert tokens_in_common == min(_common(asked, leader), usable) == min(most, usable)
            assert 2 * tokens_in_common >= len(leader.tokens)
        known.forget()
        known.check_integrity(set(computing))


def _common(one: LiveSequence, other: LiveSequence) -> int:
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))
