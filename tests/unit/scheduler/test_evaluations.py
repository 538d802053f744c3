"""Inputs whose tokens are scored, or that get a vector: they end where their prompt ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from executor_service.backends.numpy_sampler import log_softmax
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import NeverFits, NoRoom, TooLate
from scheduler_service.core.evaluation import Evaluation, EvaluationInput, HiddenPooling
from scheduler_service.core.events import EndReason, Failure
from scheduler_service.core.request import Request, SamplingSettings
from scheduler_service.core.snapshot import AdapterUse
from scheduler_service.core.step import Capacity, Code, RowMode, ScoredTokens
from tests.unit.scheduler.engine_executor import ADAPTERS, VOCABULARY, EngineExecutor, oracle
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request

ROOM = Capacity(128, 4, 256, 16, 16, 256, hidden_size=16)
TEXT = tuple(np.random.default_rng(3).integers(0, VOCABULARY, 200).tolist())


def evaluation(
    request_id: str,
    *inputs: tuple[tuple[int, ...], int],
    pooling: HiddenPooling | None = None,
    k: int = 0,
    **other: object,
) -> Request:
    """Each input is its tokens, and the position from which they are scored."""
    return Request(
        id=request_id,
        prompt=(),
        sampling=SamplingSettings(),
        n=len(inputs),
        prompt_logprobs=k,
        evaluation=Evaluation(tuple(EvaluationInput(*one) for one in inputs), pooling),
        **other,  # type: ignore[arg-type]
    )


def harness(capacity: Capacity = ROOM, **config: int) -> Harness:
    return Harness(
        EngineExecutor(capacity), CoreConfig(**{"max_step_tokens": 64, "prefill_chunk_tokens": 16, **config})
    )


def expected(tokens: tuple[int, ...], first: int) -> list[float]:
    """Logprobs of tokens[first:], by the oracle's definition."""
    (whole,) = oracle(256).forward_once([np.array(tokens, np.int32)], frozenset({"logits"}))
    assert whole.logits is not None
    return log_softmax(whole.logits)[np.arange(first - 1, len(tokens) - 1), tokens[first:]].tolist()


def test_each_input_gets_its_scores_and_ends() -> None:
    run = harness()
    run.add(evaluation("a", (TEXT[:50], 1), (TEXT[50:60], 9), k=2))
    run.run()
    assert run.logprobs(("a", 0)) == pytest.approx(expected(TEXT[:50], 1), abs=1e-5)
    assert run.logprobs(("a", 1)) == pytest.approx(expected(TEXT[50:60], 9), abs=1e-5)
    ends = [run.finished["a", index] for index in (0, 1)]
    assert [end.reason for end in ends] == [EndReason.EVALUATED] * 2
    assert [end.usage.prompt_tokens for end in ends] == [50, 10]
    counters = run.core.snapshot().counters
    assert (counters.prompt_tokens, counters.finished, counters.completion_tokens) == (60, 1, 0)


@pytest.mark.parametrize("pooling", HiddenPooling)
def test_each_input_gets_one_vector(pooling: HiddenPooling) -> None:
    run = harness()
    run.add(evaluation("a", (TEXT[:50], 0), (TEXT[:1], 0), pooling=pooling))
    run.run()
    for index, tokens in enumerate((TEXT[:50], TEXT[:1])):
        (whole,) = oracle(256).forward_once([np.array(tokens, np.int32)], frozenset({"hidden"}))
        assert whole.hidden is not None
        vector = whole.hidden[-1] if pooling is HiddenPooling.LAST else whole.hidden.mean(axis=0)
        assert np.frombuffer(run.vectors["a", index], "<f4") == pytest.approx(vector, abs=1e-5)


def test_the_last_token_of_a_scored_input_is_not_fed() -> None:
    run = harness()
    run.add(evaluation("a", (TEXT[:12], 3)))
    plan = run.plan()
    assert plan is not None
    assert [(opening.limit, opening.mode) for opening in plan.openings] == [(11, RowMode.NONE)]
    run.answer()
    assert ("a", 0) in run.finished


def test_inputs_wait_for_the_one_that_computes_their_common_prefix() -> None:
    run = harness(prefill_chunk_tokens=64)
    query = TEXT[:48]
    run.add(evaluation("a", *((query + TEXT[60 + 9 * i : 69 + 9 * i], 48) for i in range(4))))
    plan = run.plan()
    assert plan is not None
    assert len(plan.openings) == 1
    assert run.core.snapshot().waiting == 3
    run.answer()
    plan = run.plan()
    assert plan is not None
    assert len(plan.openings) == 3
    run.answer()
    run.run()
    # 44 tokens are on full pages below the first score; the prompt's last token is not fed.
    assert [run.finished["a", index].usage.cached_tokens for index in range(4)] == [0, 44, 44, 44]
    assert run.core.snapshot().counters.prefilled_tokens == 56 + 3 * (56 - 44)
    for index in range(4):
        tokens = query + TEXT[60 + 9 * index : 69 + 9 * index]
        assert run.logprobs(("a", index)) == pytest.approx(expected(tokens, 48), abs=1e-5)


def test_inputs_of_an_adapter_share_its_slot_and_no_prefix_with_those_of_another() -> None:
    """Whether they wait for a slot or not, they bring what they bring alone."""
    room = replace(ROOM, max_adapter_slots=1)
    inputs = [(TEXT[:48] + TEXT[60 + 9 * i : 69 + 9 * i], 48) for i in range(3)]
    calls = [
        evaluation(name, *inputs, (TEXT[100:110], 1), adapter=adapter)
        for name, adapter in (("a", ADAPTERS[0]), ("b", ADAPTERS[1]), ("plain", b""))
    ]
    run = harness(room)
    for call in calls:
        run.add(call)
    plan = run.plan()
    assert plan is not None
    assert [opening.adapter for opening in plan.openings] == [ADAPTERS[0]] * 2 + [b""] * 2
    assert run.core.adapter_use() == {ADAPTERS[0]: AdapterUse(2, 2), ADAPTERS[1]: AdapterUse(0, 4)}
    run.answer()
    run.run()
    scores = []
    for call in calls:
        alone = harness(room)
        alone.add(call)
        alone.run()
        scores.append([alone.logprobs((call.id, index)) for index in range(4)])
        assert [run.logprobs((call.id, index)) for index in range(4)] == [
            pytest.approx(one, abs=1e-5) for one in scores[-1]
        ]
        cached = [run.finished[call.id, index].usage.cached_tokens for index in range(4)]
        assert cached == [0, 44, 44, 0]
    assert len({tuple(one[3]) for one in scores}) == 3


def test_inputs_with_an_adapter_are_given_to_no_executor_without_adapters() -> None:
    call = evaluation("a", (TEXT[:9], 1), adapter=ADAPTERS[0])
    with pytest.raises(NeverFits, match="the executor has none") as caught:
        harness().add(call)
    assert caught.value.field == "model"
    run = harness(replace(ROOM, max_adapter_slots=1))
    run.add(call)
    run.lose()
    run.executor = EngineExecutor(ROOM)
    run.ready()
    assert "the executor has none" in run.failed["a"].message


def test_nobody_is_preempted_for_an_input_whose_scores_the_answer_has_no_room_for() -> None:
    """The scores of another call, which is served before it, take all of the room."""
    run = harness(replace(ROOM, max_output_bytes=8), max_running=3)
    run.add(make_request("before", TEXT[:60], max_tokens=1, identity="last"))
    run.run()
    run.add(evaluation("scored", (TEXT[:40], 1), identity="first"))
    for number in range(2):
        run.add(make_request(f"{number}", TEXT[60 + number : 160 + number], identity="long"))
    run.step()
    run.add(evaluation("refused", (TEXT[:20], 1), identity="last"))
    run.step()
    assert run.core.snapshot().counters.preemptions == 0
    run.run()
    assert len(run.logprobs(("refused", 0))) == 19


def test_a_loss_amid_a_scored_prompt_keeps_the_scores_that_came() -> None:
    """The cache that replaces the lost one is asked for the others alone."""
    run = harness()
    run.add(evaluation("a", (TEXT[:60], 1)))
    run.step()
    run.step()
    had = len(run.logprobs(("a", 0)))
    assert had == 20
    run.plan()
    run.lose()
    run.ready()
    plan = run.plan()
    assert plan is not None
    assert [opening.scored_from for opening in plan.openings] == [1 + had]
    run.run()
    assert run.logprobs(("a", 0)) == pytest.approx(expected(TEXT[:60], 1), abs=1e-5)


def test_a_step_asks_for_no_more_scores_than_its_answer_may_hold() -> None:
    """22 bytes a token with two alternatives: 9 tokens in 200 bytes."""
    run = harness(replace(ROOM, max_output_bytes=200))
    run.add(evaluation("a", (TEXT[:40], 1), (TEXT[40:80], 1), k=2))
    run.add(make_request("b", TEXT[:20], max_tokens=2))
    plan = run.plan()
    assert plan is not None
    assert [(opening.scored_from, opening.limit) for opening in plan.openings] == [(1, 9)]
    run.run()
    for index in (0, 1):
        tokens = TEXT[40 * index : 40 * index + 40]
        assert run.logprobs(("a", index)) == pytest.approx(expected(tokens, 1), abs=1e-5)
    assert len(run.tokens["b", 0]) == 2


def test_tokens_with_scores_count_half_as_much_again() -> None:
    """So that a step of scores takes no longer than one of other prompts."""
    run = harness()
    run.add(evaluation("a", (TEXT[:40], 1), (TEXT[:40], 11), *((TEXT[40 + i : 80 + i], 1) for i in range(4))))
    plan = run.plan()
    assert plan is not None
    # Chunks of 16: 10 of 1.5, or 10 of 1 and 4 of 1.5. 3 of the step's 64 are left for a fifth input.
    assert [opening.limit for opening in plan.openings] == [10, 14, 10, 10, 2]


def test_a_step_asks_for_no_more_vectors_than_its_answer_may_hold() -> None:
    run = harness(replace(ROOM, max_output_bytes=150))
    run.add(evaluation("a", *((TEXT[i : i + 3], 0) for i in range(5)), pooling=HiddenPooling.LAST))
    plan = run.plan()
    assert plan is not None
    assert len(plan.openings) == 2  # 64 bytes each
    run.run()
    assert len(run.vectors) == 5


def test_an_answer_without_the_scores_that_are_due_opens_the_prompt_again_and_then_fails() -> None:
    run = Harness(FakeExecutor(CAPACITY))
    run.add(evaluation("a", ((1, 2, 3), 1)))
    run.run()
    assert run.failed["a"].failure is Failure.REFUSED
    assert "no scores from token 1 on" in run.failed["a"].message


def test_scores_at_another_position_are_not_taken() -> None:
    run = harness()
    run.add(evaluation("a", (TEXT[:10], 2)))
    plan = run.plan()
    assert plan is not None
    answer = run.executor.execute(plan)
    answer.rows[0].scores = ScoredTokens(3, [0.0] * 8)
    run.answer(answer)
    assert not run.scores
    assert run.core.snapshot().waiting == 1


def test_a_call_is_queued_until_the_last_of_its_inputs_is_started() -> None:
    """So its tokens count for the queue's bounds that long."""
    run = harness(max_running=1, max_queued_requests=1)
    run.add(evaluation("a", (TEXT[:20], 1), (TEXT[20:40], 1)))
    run.step()
    with pytest.raises(NoRoom):
        run.add(make_request("b"))
    while ("a", 0) not in run.finished:
        run.step()
    run.plan()
    run.add(make_request("b"))
    run.run()


def test_an_input_fills_the_context_and_no_more() -> None:
    run = harness(replace(ROOM, context_length=40))
    run.add(evaluation("a", (TEXT[:40], 1)))
    run.add(evaluation("b", (TEXT[:40], 0), pooling=HiddenPooling.LAST))
    for number, (tokens, first) in enumerate([(TEXT[:41], 1), (TEXT[:5], 5), (TEXT[:5], 0)]):
        with pytest.raises(NeverFits) as caught:
            run.add(evaluation(f"c{number}", (TEXT[:2], 1), (tokens, first)))
        assert caught.value.field == "inputs[1]"
    run.run()
    assert len(run.logprobs(("a", 0))) == 39
    assert len(run.vectors) == 1


def test_a_call_that_fills_the_pool_to_the_last_page_is_computed() -> None:
    run = harness(replace(ROOM, total_pages=10))
    run.add(evaluation("a", (TEXT[:40], 1)))
    run.add(evaluation("b", (TEXT[:40], 0), pooling=HiddenPooling.LAST))
    run.run()
    assert len(run.logprobs(("a", 0))) == 39


def test_a_cancelled_call_ends_all_its_inputs() -> None:
    run = harness(prefill_chunk_tokens=8)
    run.add(evaluation("a", *(((*TEXT[:48], i), 48) for i in range(3))))
    run.step()
    run.cancel("a")
    run.run()
    assert run.failed["a"].failure is Failure.CANCELLED
    assert not run.failed["a"].emitted


def test_a_request_whose_row_is_not_finite_fails_alone() -> None:
    run = Harness(FakeExecutor(CAPACITY))
    run.executor.refuse = {1: Code.INTERNAL}  # type: ignore[attr-defined]
    run.add(evaluation("a", ((1, 2, 3), 1), ((4, 5, 6), 1)))
    run.add(make_request("b"))
    run.run()
    assert run.failed["a"].failure is Failure.NOT_FINITE
    assert ("b", 0) in run.finished


def test_a_deadline_is_judged_by_prompts_that_share_steps() -> None:
    """Four inputs of 16 tokens take one step of 64, not four."""
    run = harness()
    run.add(make_request("busy", max_tokens=200))
    for _ in range(10):
        run.step()
    inputs = [(TEXT[16 * i : 16 * i + 16], 1) for i in range(4)]
    run.add(evaluation("a", *inputs, deadline=run.now + 0.03))
    with pytest.raises(TooLate):
        run.add(evaluation("b", *inputs, *inputs, *inputs, deadline=run.now + 0.03))
    run.run()
    assert ("a", 3) in run.finished


def test_the_prompt_of_a_request_is_scored_before_its_first_token() -> None:
    """With alternatives of its own number, whatever its sampled tokens have."""
    run = harness()
    wanted = make_request("a", TEXT[:40], prompt_logprobs=3, n=2)
    run.add(replace(wanted, sampling=replace(wanted.sampling, logprobs=1)))
    run.run()
    assert run.logprobs(("a", 0)) == pytest.approx(expected(TEXT[:40], 1), abs=1e-5)
    assert ("a", 1) not in run.scores
    plain = harness()
    plain.add(make_request("a", TEXT[:40], n=2))
    plain.run()
    assert run.tokens == plain.tokens


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_sampled_tokens_have_the_alternatives_that_they_ask_for(logprobs: int | None) -> None:
    run = harness()
    wanted = make_request("a", TEXT[:20], prompt_logprobs=2)
    run.add(replace(wanted, sampling=replace(wanted.sampling, logprobs=logprobs)))
    found = [event for _ in range(8) for event in run.step() if hasattr(event, "logprobs")]
    assert found
    for event in found:
        assert [len(one.top_ids) for one in event.logprobs] == ([] if logprobs is None else [logprobs])
