"""How a completion ends well, and what its usage says."""

from __future__ import annotations

import pytest

from scheduler_service.core.errors import UnknownStep
from scheduler_service.core.events import EndReason, Tokens
from scheduler_service.core.step import RowAnswer, StepAnswer, TopLogprobs
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request, solo


def test_an_end_token_is_part_of_the_ids_and_named() -> None:
    tokens = solo(FakeExecutor(CAPACITY), make_request("a", max_tokens=8))[0]
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", max_tokens=8, eos_token_ids=frozenset({tokens[3]})))
    harness.run()
    assert harness.tokens["a", 0] == tokens[:4]
    assert harness.finished["a", 0].reason is EndReason.EOS
    assert harness.finished["a", 0].matched_id == tokens[3]
    assert harness.finished["a", 0].usage.completion_tokens == 4


def test_a_stop_token_is_told_from_the_models_own_end() -> None:
    tokens = solo(FakeExecutor(CAPACITY), make_request("a", max_tokens=8))[0]
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", max_tokens=8, stop_token_ids=frozenset({tokens[2]})))
    harness.run()
    assert harness.finished["a", 0].reason is EndReason.STOP_TOKEN


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 4), (3, 4), (4, 8)])
def test_the_first_min_tokens_never_end_it(min_tokens: int, length: int) -> None:
    tokens = solo(FakeExecutor(CAPACITY), make_request("a", max_tokens=8))[0]
    harness = Harness(FakeExecutor(CAPACITY))
    stops = frozenset({tokens[3]})
    harness.add(make_request("a", max_tokens=8, min_tokens=min_tokens, stop_token_ids=stops))
    harness.run()
    assert len(harness.tokens["a", 0]) == length


def test_an_end_token_on_the_last_place_is_the_reason() -> None:
    tokens = solo(FakeExecutor(CAPACITY), make_request("a", max_tokens=4))[0]
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", max_tokens=4, eos_token_ids=frozenset({tokens[3]})))
    harness.run()
    assert harness.finished["a", 0].reason is EndReason.EOS


def test_a_stop_string_ends_one_completion_and_leaves_the_others() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", n=2, max_tokens=6))
    for _ in range(3):
        harness.step()
    harness.plan()
    harness.stop("a", 0)  # while its next row is out
    assert harness.finished["a", 0].reason is EndReason.STOP_STRING
    assert harness.core.stop("a", 0, harness.now) is None
    assert harness.core.stop("a", 7, harness.now) is None
    harness.answer()
    harness.run()
    assert harness.finished["a", 1].reason is EndReason.LENGTH
    assert harness.core.stop("a", 1, harness.now) is None


def test_a_run_of_tokens_is_cut_where_it_ends() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a", eos_token_ids=frozenset({9}), max_tokens=9))
    plan = harness.plan()
    assert plan is not None
    logprobs = [TopLogprobs(-0.5), TopLogprobs(-0.25), TopLogprobs(-0.125)]
    row = RowAnswer(kv_length=5, tokens=[8, 9, 10], logprobs=logprobs)
    events = harness.answer(StepAnswer(plan.number, [row], [], 10, 0))
    assert events[0] == Tokens("a", 0, (8, 9), (TopLogprobs(-0.5), TopLogprobs(-0.25)), 0)
    assert harness.finished["a", 0].matched_id == 9


def test_usage_tells_how_long_and_how_much() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.now = 100.0
    harness.add(make_request("a", range(5), max_tokens=3, arrival=99.0))
    harness.run()
    usage = harness.finished["a", 0].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.preemptions) == (5, 3, 0)
    assert (usage.queue_s, usage.first_token_s, usage.total_s) == pytest.approx((1.0, 1.01, 1.03))


def test_an_answer_to_no_step_changes_nothing() -> None:
    harness = Harness(FakeExecutor(CAPACITY))
    harness.add(make_request("a"))
    plan = harness.plan()
    assert plan is not None
    for wrong in (
        StepAnswer(plan.number + 1, [RowAnswer(3, [1])], [], 1, 1),
        StepAnswer(plan.number, [], [], 1, 1),
        StepAnswer(plan.number, [RowAnswer(3, [1])], [RowAnswer()], 1, 1),
    ):
        with pytest.raises(UnknownStep):
            harness.core.apply(wrong, 0.0)
    harness.answer()
    harness.run()
    assert ("a", 0) in harness.finished
