"""Drafts in the core: same tokens, fewer steps, and nobody waits long for a draft executor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import IllegalEvent, UnknownStep
from scheduler_service.core.events import EndReason, Failure
from scheduler_service.core.request import DraftingWish, DraftSource, SamplingSettings
from scheduler_service.core.step import Capacity, Code, RowAnswer, StepAnswer
from tests.unit.scheduler.engine_executor import LATE, TURNS, EngineExecutor, oracle
from tests.unit.scheduler.harness import STEP_S, Harness, make_request, solo

CAPACITY = Capacity(256, 4, 256, 16, 16, 64)
NGRAM, EXECUTOR = frozenset({DraftSource.NGRAM}), frozenset({DraftSource.EXECUTOR})
GRAMMAR = frozenset({DraftSource.GRAMMAR})
REPEATING = SamplingSettings(temperature=1.0, seed=3, logit_bias=((1, 50.0), (2, 50.0)))  # n-grams match

CONSTRAINED = SamplingSettings(temperature=1.0, seed=3, grammar=TURNS)


def harness(
    agreement: float | None = 0.8, config: CoreConfig | None = None, **draft_capacity: int
) -> Harness:
    """With a draft executor of that agreement; None: without."""
    drafter = replace(CAPACITY, **draft_capacity)
    draft = None if agreement is None else EngineExecutor(drafter, oracle(drafter.context_length, agreement))
    return Harness(EngineExecutor(CAPACITY), config, draft=draft)


def plain(request_id: str, **other: object) -> list[int]:
    """What comes out without speculation."""
    return solo(EngineExecutor(CAPACITY), make_request(request_id, **other))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [None, 1, 3, 8])
@pytest.mark.parametrize("drafters", [NGRAM, EXECUTOR, NGRAM | EXECUTOR])
def test_drafts_save_steps_and_change_no_token(drafters: frozenset[DraftSource], length: int | None) -> None:
    run = harness()
    request = replace(make_request("a", max_tokens=80), sampling=REPEATING)
    expected = solo(EngineExecutor(CAPACITY), request)[0]
    run.add(replace(request, speculation=DraftingWish(drafters, length)))
    run.run()
    assert run.tokens["a", 0] == expected
    usage = run.finished["a", 0].usage
    assert usage.accepted_tokens > 10
    assert run.core.snapshot().counters.steps <= 82 - usage.accepted_tokens
    assert usage.drafted_tokens == sum(usage.drafted_by_position)
    assert usage.accepted_tokens == sum(usage.accepted_by_position)
    assert usage.drafted_by_position[0] == usage.verifications
    assert all(a <= d for a, d in zip(usage.accepted_by_position, usage.drafted_by_position, strict=True))
    counters = run.core.snapshot().counters
    assert counters.verifications == usage.verifications
    assert (counters.drafted_tokens, counters.accepted_tokens) == (
        usage.drafted_tokens,
        usage.accepted_tokens,
    )


@pytest.mark.parametrize("length", [None, 2])
@pytest.mark.parametrize("drafters", [GRAMMAR, GRAMMAR | NGRAM, GRAMMAR | EXECUTOR, NGRAM])
def test_what_a_grammar_forces_is_drafted_where_its_drafter_is_wished(
    drafters: frozenset[DraftSource], length: int | None
) -> None:
    run = harness()
    request = replace(make_request("a", max_tokens=60), sampling=CONSTRAINED)
    expected = solo(EngineExecutor(CAPACITY), request)[0]
    run.add(replace(request, speculation=DraftingWish(drafters, length)))
    run.run()
    assert run.tokens["a", 0] == expected
    usage, counters = run.finished["a", 0].usage, run.core.snapshot().counters
    if drafters >= GRAMMAR:
        assert usage.grammar_accepted_tokens == usage.grammar_drafted_tokens > 5
    else:
        assert usage.grammar_accepted_tokens == usage.grammar_drafted_tokens == 0
    assert usage.grammar_accepted_tokens <= usage.accepted_tokens
    assert counters.grammar_drafted_tokens == usage.grammar_drafted_tokens
    assert counters.grammar_accepted_tokens == usage.grammar_accepted_tokens
    if drafters == GRAMMAR:
        assert usage.drafted_tokens == usage.grammar_drafted_tokens
    if length:
        assert len(usage.drafted_by_position) <= length


@pytest.mark.parametrize("in_flight", [1, 2])
def test_forced_tokens_end_a_rest(in_flight: int) -> None:
    """Sequences that have had no promising drafts for long still get those that a grammar forces later."""
    run = harness(None, CoreConfig(max_in_flight=in_flight))
    free = SamplingSettings(temperature=1.0, seed=3, grammar=LATE)
    requests = [replace(make_request(f"r{i}", max_tokens=120), sampling=free.with_seed(i)) for i in range(3)]
    expected = [solo(EngineExecutor(CAPACITY), request)[0] for request in requests]
    for request in requests:
        run.add(replace(request, speculation=DraftingWish(GRAMMAR | NGRAM)))
    run.run()
    for request, tokens in zip(requests, expected, strict=True):
        assert run.tokens[request.id, 0] == tokens
        assert run.finished[request.id, 0].usage.grammar_accepted_tokens > 10


def test_a_request_without_a_grammar_has_nothing_that_its_drafter_could_draft() -> None:
    run = harness(None)
    run.add(make_request("a", max_tokens=20, speculation=DraftingWish(GRAMMAR)))
    run.run()
    assert run.tokens["a", 0] == plain("a", max_tokens=20)
    assert run.finished["a", 0].usage.verifications == 0


def test_without_a_wish_nothing_is_drafted() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=20))
    run.run()
    assert run.finished["a", 0].usage.verifications == 0
    assert run.core.snapshot().counters.drafted_tokens == 0


def test_a_perfect_draft_fills_every_row_and_never_passes_the_end() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=21, speculation=DraftingWish(EXECUTOR, 4)))
    run.run()
    usage = run.finished["a", 0].usage
    assert run.tokens["a", 0] == plain("a", max_tokens=21)
    assert usage.accepted_tokens == usage.drafted_tokens  # more than could be emitted was never asked for
    assert usage.completion_tokens == 21


def test_a_stop_token_inside_an_accepted_run_ends_the_output_there() -> None:
    expected = plain("a", max_tokens=40)
    at = next(i for i in range(7, 40) if expected[i] not in expected[:i])
    request = make_request("a", max_tokens=40, stop_token_ids=frozenset({expected[at]}))
    run = harness(1.0)
    run.add(replace(request, speculation=DraftingWish(EXECUTOR, 8)))
    run.run()
    assert run.tokens["a", 0] == expected[: at + 1]
    assert run.finished["a", 0].reason is EndReason.STOP_TOKEN
    assert run.finished["a", 0].usage.completion_tokens == at + 1


def test_n_completions_draft_each_for_itself() -> None:
    run = harness()
    request = make_request("a", max_tokens=30, n=3)
    run.add(replace(request, speculation=DraftingWish(EXECUTOR, 4)))
    run.run()
    expected = solo(EngineExecutor(CAPACITY), request)
    for index in range(3):
        assert run.tokens["a", index] == expected[index]
        assert run.finished["a", index].usage.accepted_tokens > 5


def test_a_frozen_draft_executor_costs_one_pause() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=60, speculation=DraftingWish(EXECUTOR, 4)))
    while not run.core.snapshot().counters.verifications:
        run.step()
    began, known = run.now, len(run.tokens["a", 0])
    assert run.plan_draft() is not None  # and is never answered
    while ("a", 0) not in run.finished:
        while run.plan() is not None:
            pass
        if run.unanswered:
            run.answer()
        else:
            wakeup = run.core.next_wakeup(run.now)
            assert wakeup is not None, "it waits for ever"
            run.now = max(run.now, wakeup)
    assert run.now - began <= 0.06 + STEP_S * (60 - known)
    assert run.tokens["a", 0] == plain("a", max_tokens=60)


def test_a_late_draft_counts_as_far_as_it_fits() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=60, speculation=DraftingWish(EXECUTOR, 6)))
    while not run.core.snapshot().counters.verifications:
        run.step()
    assert run.plan_draft() is not None
    run.now += 0.2
    assert run.plan() is not None  # patience is over
    run.answer()
    run.answer_draft()
    plan = run.plan()
    assert plan is not None
    assert len(plan.rows[0].drafts) == 5  # the first of six was sampled meanwhile
    run.run()
    assert run.tokens["a", 0] == plain("a", max_tokens=60)


def test_a_lost_draft_executor_means_plain_decoding_until_one_returns() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=60, speculation=DraftingWish(EXECUTOR, 3)))
    for _ in range(6):
        run.step()
    stale = run.plan_draft()
    run.lose_draft()
    assert not run.core.snapshot().draft_executor
    if stale is not None:
        with pytest.raises(UnknownStep):
            run.core.apply_draft(StepAnswer(stale.number, [], [], 0, 0), run.now)
    verifications = run.core.snapshot().counters.verifications
    for _ in range(5):
        assert len(run.step()) == 1
    assert run.core.snapshot().counters.verifications <= verifications + 1
    assert run.draft is not None
    run.core.draft_ready(run.draft.capacity)
    run.run()
    assert run.core.snapshot().counters.verifications > verifications + 3
    assert run.tokens["a", 0] == plain("a", max_tokens=60)


def test_a_second_draft_executor_is_an_illegal_event() -> None:
    run = harness(1.0)
    with pytest.raises(IllegalEvent):
        run.core.draft_ready(CAPACITY)


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED])
def test_a_refused_verification_is_retried_without_drafts(code: Code) -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=30, speculation=DraftingWish(EXECUTOR, 4)))
    while True:
        while run.plan_draft() is not None:
            run.answer_draft()
        plan = run.plan()
        assert plan is not None
        if plan.rows and plan.rows[0].drafts:
            break
        run.answer()
    run.answer(StepAnswer(plan.number, [RowAnswer(code=code, message="no")], [], 200, 0))
    run.plan_draft()
    again = run.plan()
    assert again is not None
    assert again.rows[0].drafts == ()
    run.run()
    assert run.tokens["a", 0] == plain("a", max_tokens=30)


def test_poisonous_logits_without_drafts_still_fail_the_request() -> None:
    run = harness(None)
    run.add(make_request("a", max_tokens=30, speculation=DraftingWish(NGRAM)))
    run.step()
    plan = run.plan()
    assert plan is not None
    run.answer(StepAnswer(plan.number, [RowAnswer(code=Code.INTERNAL)], [], 200, 0))
    assert run.failed["a"].failure is Failure.NOT_FINITE


def test_one_near_its_deadline_gets_no_drafts() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=40, deadline=0.1, speculation=DraftingWish(EXECUTOR, 4)))
    drafted_late = False
    while not run.idle:
        while run.plan_draft() is not None:
            run.answer_draft()
        plan = run.plan()
        if plan is not None and run.now > 0.07:
            drafted_late |= any(row.drafts for row in plan.rows)
        if run.unanswered:
            run.answer()
    assert not drafted_late


def test_drafts_take_only_what_tokens_others_leave() -> None:
    run = harness(1.0, CoreConfig(max_step_tokens=8, prefill_chunk_tokens=8))
    for i in range(4):
        run.add(make_request(f"r{i}", max_tokens=30, speculation=DraftingWish(EXECUTOR, 8)))
    run.add(make_request("late", prompt=range(30), max_tokens=5))
    run.run()  # the harness holds every step to its budget
    for i in range(4):
        assert run.tokens[f"r{i}", 0] == plain(f"r{i}", max_tokens=30)
    assert run.tokens["late", 0] == plain("late", prompt=range(30), max_tokens=5)


def test_long_prompts_are_indexed_without_stalling_a_step() -> None:
    capacity = Capacity(4096, 16, 16384, 4, 4, 16384)
    run = Harness(EngineExecutor(capacity), CoreConfig(max_step_tokens=16384, prefill_chunk_tokens=16384))
    run.add(
        make_request("a", prompt=[i % 41 for i in range(9000)], max_tokens=6, speculation=DraftingWish(NGRAM))
    )
    run.step()
    run.step()
    drafts = run.core._pool.running[0].draft_state
    assert drafts is not None
    assert drafts.ngram is not None
    assert 9000 - 2 * 2048 <= drafts.ngram.index.lag < 9000
    run.run()


def test_an_isolated_sequence_runs_alone_and_without_drafts() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=40, speculation=DraftingWish(EXECUTOR, 4)))
    for _ in range(2):
        while run.plan() is None:
            run.step()
        run.lose()
        run.ready()
    assert run.core._pool.isolated
    while run.core._pool.isolated:
        assert run.plan_draft() is None or not run.drafting or run.drafting.rows == ()
        if run.drafting is not None:
            run.answer_draft()
        plan = run.plan()
        assert plan is not None
        assert not any(row.drafts for row in plan.rows)
        run.answer()
    run.run()
    assert run.finished["a", 0].usage.accepted_tokens > 10
    assert run.tokens["a", 0] == plain("a", max_tokens=40)
