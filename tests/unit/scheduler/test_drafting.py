"""The draft executor's caches follow the target: catch-ups, truncations, releases, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core.errors import UnknownStep
from scheduler_service.core.request import DraftingWish, DraftSource
from scheduler_service.core.step import CacheTruncation, Capacity, Code, PlannedStep, RowAnswer, StepAnswer
from tests.unit.scheduler.engine_executor import EngineExecutor, oracle
from tests.unit.scheduler.harness import Harness, make_request, parts, solo

CAPACITY = Capacity(256, 4, 256, 16, 16, 64)
FOUR = DraftingWish(frozenset({DraftSource.EXECUTOR}), 4)


def harness(agreement: float = 1.0, **draft_capacity: int) -> Harness:
    capacity = replace(CAPACITY, **draft_capacity)
    draft = EngineExecutor(capacity, oracle(capacity.context_length, agreement))
    return Harness(EngineExecutor(CAPACITY), draft=draft)


def draft_steps(run: Harness, steps: int = 200) -> list[PlannedStep]:
    """Run to the end; all the draft executor's plans."""
    plans: list[PlannedStep] = []
    for _ in range(steps):
        while (plan := run.plan_draft()) is not None:
            plans.append(plan)
            run.answer_draft()
        while run.plan() is not None:
            pass
        if run.unanswered:
            run.answer()
        if run.idle:
            return plans
    raise AssertionError("not idle")


def known(run: Harness, request_id: str = "a") -> list[int]:
    """All known tokens of its first completion."""
    return [*run.requests[request_id].prompt, *run.tokens[request_id, 0]]


def check_output(run: Harness) -> None:
    for request in run.requests.values():
        expected = solo(EngineExecutor(CAPACITY), replace(request, speculation=DraftingWish()))
        for index in range(request.n):
            assert run.tokens[request.id, index] == expected[index]
    assert isinstance(run.draft, EngineExecutor)
    assert run.draft.owned_pages == 0


def test_after_full_acceptance_it_catches_up_with_the_last_draft_and_the_token_after_it() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=40, speculation=FOUR))
    plans = draft_steps(run)
    tokens = known(run)
    rows = [plan.rows[0] for plan in plans if plan.rows]
    assert len(rows) > 5
    assert not any(plan.truncates for plan in plans)
    for row in rows[1:]:
        assert row.tokens == tuple(tokens[row.kv_length : row.kv_length + 2])
        assert row.steps == 4 or row is rows[-1]
    check_output(run)


def test_after_a_rejection_it_is_cut_to_what_was_accepted() -> None:
    run = harness(0.5)
    run.add(make_request("a", max_tokens=60, speculation=FOUR))
    plans = draft_steps(run)
    tokens = known(run)
    cuts = 0
    for plan in plans:
        for row in plan.rows:
            assert row.tokens == tuple(tokens[row.kv_length : row.kv_length + len(row.tokens)])
            if plan.truncates:
                assert plan.truncates == (CacheTruncation(row.cache_id, row.kv_length),)
                assert len(row.tokens) == 1
                cuts += 1
    assert cuts > 5
    check_output(run)


def test_a_long_prompt_is_learnt_in_chunks_while_it_decodes_plainly() -> None:
    run = harness(1.0, max_step_tokens=8)
    run.add(make_request("a", prompt=range(40), max_tokens=40, speculation=FOUR))
    plans = draft_steps(run)
    assert plans[0].openings[0].limit == 8
    assert sum(row.limit > 0 for plan in plans for row in plan.rows) >= 3
    assert run.finished["a", 0].usage.accepted_tokens > 10
    check_output(run)


@pytest.mark.parametrize("how", ["cancel", "end", "lose", "preempt"])
def test_its_cache_goes_with_the_targets(how: str) -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=60, speculation=FOUR))
    while not run.core.snapshot().counters.verifications:
        run.step()
    (cache_id,) = run.drafted_caches
    if how == "cancel":
        run.cancel("a")
    elif how == "end":
        run.stop("a", 0)
    elif how == "lose":
        run.lose()
    else:
        run.core._pool.preempt(run.core._pool.running[0])
    plan = run.plan_draft()
    assert plan is not None
    assert plan.releases == (cache_id,)
    run.answer_draft()
    if how == "lose":
        run.ready()
    run.run()
    assert isinstance(run.draft, EngineExecutor)
    assert run.draft.owned_pages == 0
    if how in ("lose", "preempt"):
        check_output(run)


def test_an_answer_that_ends_elsewhere_releases_the_cache_and_decodes_plainly_for_a_while() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=80, speculation=FOUR))
    while not run.core.snapshot().counters.verifications:
        run.step()
    (cache_id,) = run.drafted_caches
    plan = run.plan_draft()
    assert plan is not None
    assert plan.rows[0].steps == 4
    run.answer_draft(StepAnswer(plan.number, [RowAnswer(99, [1, 2, 3, 4])], [], 200, 0))
    assert run.plan() is not None  # at once
    run.answer()
    plan = run.plan_draft()
    assert plan is not None
    assert plan.releases == (cache_id,)
    run.answer_draft()
    before = run.core.snapshot().counters.verifications
    for _ in range(10):
        run.step()
    assert run.core.snapshot().counters.verifications == before
    run.run()
    assert run.core.snapshot().counters.verifications > before
    check_output(run)


@pytest.mark.parametrize("code", [Code.RESOURCE_EXHAUSTED, Code.NOT_FOUND, Code.INTERNAL])
def test_whatever_the_draft_executor_refuses_harms_nobody(code: Code) -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=60, speculation=FOUR))
    run.add(make_request("b", max_tokens=60, seed=9, speculation=FOUR))
    while run.core.snapshot().counters.verifications < 2:
        run.step()
    while (plan := run.plan_draft()) is None or not plan.rows:
        run.step()
    run.answer_draft(StepAnswer(plan.number, [RowAnswer(code=code) for _ in parts(plan)], [], 0, 0))
    run.run()
    check_output(run)


@pytest.mark.parametrize(
    "small",
    [{"max_sequences": 1}, {"max_rows": 1}, {"total_pages": 6}, {"context_length": 20}, {"max_steps": 2}],
)
def test_a_draft_executor_smaller_than_the_target_serves_whom_it_can(small: dict[str, int]) -> None:
    run = harness(1.0, **small)
    for i in range(3):
        run.add(make_request(f"r{i}", prompt=range(i, i + 5), seed=i, max_tokens=30, speculation=FOUR))
    run.run()
    assert run.core.snapshot().counters.accepted_tokens > 5
    check_output(run)


def test_a_prompt_that_kills_draft_executors_is_left_alone_in_the_end() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=40, speculation=FOUR))
    deaths = 0
    while not run.finished:
        if run.plan_draft() is not None:
            run.lose_draft()
            deaths += 1
            assert run.draft is not None
            run.core.draft_ready(run.draft.capacity)
        while run.plan() is not None:
            pass
        if run.unanswered:
            run.answer()
    assert deaths == 3
    check_output(run)


def test_an_answer_to_another_draft_step_changes_nothing() -> None:
    run = harness(1.0)
    run.add(make_request("a", max_tokens=20, speculation=FOUR))
    run.step()
    with pytest.raises(UnknownStep):
        run.core.apply_draft(StepAnswer(5, [], [], 0, 0), run.now)
    while run.plan_draft() is None:
        run.step()
    assert run.drafting is not None
    with pytest.raises(UnknownStep, match="rows"):
        run.core.apply_draft(StepAnswer(run.drafting.number, [], [], 0, 0), run.now)
    run.answer_draft()
    run.run()
    check_output(run)


def test_the_draft_executor_never_makes_logprobs() -> None:
    run = harness(1.0)
    request = make_request("a", max_tokens=20, speculation=FOUR)
    run.add(replace(request, sampling=replace(request.sampling, logprobs=3)))
    plans = draft_steps(run)
    openings = [opening for plan in plans for opening in plan.openings]
    assert [opening.sampling.logprobs for opening in openings] == [None]
    assert openings[0].sampling.seed == request.sampling.seed
