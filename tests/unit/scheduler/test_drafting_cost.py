"""What n-gram drafts cost the core, in bytecodes, and that it keeps nothing of a sequence that has ended."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from types import FunctionType, ModuleType

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.request import DraftingWish, DraftSource, Request, SamplingSettings
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.step import Capacity, PlannedStep, StepAnswer
from tests.bench.core_overhead import Text, answer, edited
from tests.support.work import bytecodes
from tests.unit.scheduler.engine_executor import EngineExecutor, oracle
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request

PROMPT = 64
COUNTED = 8  # steps
MANY = 24  # steps, as rests do not end evenly
SETTLED = 160  # steps until sequences that never had a candidate have their longest rests
NGRAMS = DraftingWish(frozenset({DraftSource.NGRAM}))
NEW, ONE_IN_EIGHT = partial(edited, edits=1), partial(edited, edits=8)


def work_of_a_step(
    sequences: int, text: Text, wish: DraftingWish, before: int, counted: int = COUNTED
) -> float:
    """Bytecodes of plan and apply for each sequence, on average of `counted` steps after `before` others."""
    core = StepScheduler(CoreConfig(max_step_tokens=1 << 17, max_running=sequences))
    core.executor_ready(Capacity(1 << 18, 16, 1 << 20, sequences, sequences, 1 << 17), 0.0)
    for i in range(sequences):
        prompt = tuple(text(i + 1, at) for at in range(PROMPT))
        core.add(Request(str(i), prompt, SamplingSettings(), speculation=wish), 0.0)
    now, work = 0.0, 0
    result: StepAnswer | None = None
    for step in range(before + counted):
        plans: list[PlannedStep | None] = []
        do = partial(turn, core, result, now, plans)
        if step < before:
            do()
        else:
            work += bytecodes(do)
        (plan,) = plans
        assert plan is not None
        result = answer(plan, 1 << 17, text)
        now += 0.02 + 1e-4 * sum(1 + len(row.drafts) for row in plan.rows)
    return work / counted / sequences


def turn(core: StepScheduler, result: StepAnswer | None, now: float, plans: list[PlannedStep | None]) -> None:
    """Apply the last step's answer, and plan the next step."""
    if result is not None:
        core.apply(result, now)
    plans.append(core.plan(now))


@pytest.mark.parametrize("sequences", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_where_nothing_repeats_a_step_costs_little_more_than_without_drafts(sequences: int) -> None:
    plain = work_of_a_step(sequences, NEW, DraftingWish(), before=2)
    assert work_of_a_step(sequences, NEW, NGRAMS, before=SETTLED, counted=MANY) < 1.1 * plain


def test_a_step_with_drafts_costs_each_sequence_the_same_however_many_there_are() -> None:
    few, many = (work_of_a_step(sequences, ONE_IN_EIGHT, NGRAMS, before=40) for sequences in (64, 512))
    assert many < 1.1 * few


def test_where_one_token_in_eight_is_new_a_step_costs_less_than_three_plain_ones() -> None:
    plain = work_of_a_step(256, ONE_IN_EIGHT, DraftingWish(), before=2)
    assert work_of_a_step(256, ONE_IN_EIGHT, NGRAMS, before=40) < 2.75 * plain


def sequences_of(core: StepScheduler) -> int:
    """Sequences that the core holds a reference to, directly or not."""
    seen, todo, found = {id(core)}, [core], 0
    while todo:
        for held in gc.get_referents(todo.pop()):
            if id(held) not in seen and not isinstance(held, type | ModuleType | FunctionType):
                seen.add(id(held))
                todo.append(held)
                found += isinstance(held, LiveSequence)
    return found


@pytest.mark.parametrize("source", list(DraftSource))
def test_nothing_is_kept_of_sequences_that_have_ended(source: DraftSource) -> None:
    capacity = replace(CAPACITY, total_pages=256)
    draft = EngineExecutor(capacity, oracle(capacity.context_length, 1.0))
    run = Harness(EngineExecutor(capacity), draft=draft)
    for i in range(12):
        run.add(
            make_request(str(i), [i, 1, 2], max_tokens=100, speculation=DraftingWish(frozenset({source})))
        )
    for _ in range(8):
        run.step()
    while run.plan_draft() is not None:
        run.answer_draft()
    assert sequences_of(run.core) == 12
    for i in range(12):
        run.cancel(str(i))
    assert sequences_of(run.core) == 0
    run.run()  # the caches are released
    assert draft.owned_pages == 0
