"""More waits for others and for an executor than those of `constructed_waits`, which come about otherwise."""

from __future__ import annotations

from dataclasses import replace

from scheduler_service.core.step import RefusalCause, StepAnswer
from scheduler_service.core.waiting.reasons import WaitReason as R
from tests.unit.scheduler.constructed_waits import (
    LONG,
    Wait,
    alone,
    cancels,
    deadlines,
    drafting,
    evaluation,
    first_that,
    harness_of,
    no_room,
    pages,
    refused_opening,
    run_one,
    scored,
    short_of,
    small,
)
from tests.unit.scheduler.engine_executor import EngineExecutor
from tests.unit.scheduler.harness import CAPACITY, make_request
from tests.unit.scheduler.test_wait_accounting import Watched

# -- others of its own identity --------------------------------------------------------------------


def earlier_one_lacks_pages() -> Wait:
    wait = pages()
    wait.harness.add(make_request("c"))
    wait.harness.step()
    return replace(wait, who="c", reason=R.OWN_EARLIER, end=lambda: wait.harness.cancel("b"))


def earlier_one_has_lost_its_executor() -> Wait:
    harness = harness_of()
    run_one(harness)
    harness.lose()
    harness.add(make_request("b"))
    return Wait(harness, "b", R.OWN_EARLIER, harness.ready)


def higher_one_lacks_pages() -> Wait:
    wait = pages()
    wait.harness.add(make_request("c", range(200, 220), priority=1))
    wait.harness.step()
    return replace(wait, reason=R.OWN_PRIORITY, end=lambda: wait.harness.cancel("c"))


def higher_one_has_no_executor() -> Wait:
    harness = harness_of()
    run_one(harness)
    harness.lose()
    harness.add(make_request("b", priority=2))
    return Wait(harness, "a", R.OWN_PRIORITY, harness.ready)


# -- other identities ------------------------------------------------------------------------------


def turn_of_one_without_executor() -> Wait:
    harness = harness_of()
    run_one(harness, identity="x")
    harness.lose()
    harness.add(make_request("b", identity="y"))
    return Wait(harness, first_that(harness, R.OTHER_TURN), R.OTHER_TURN, harness.ready)


def turn_of_one_without_pages() -> Wait:
    harness = harness_of(small())
    harness.add(make_request("a", range(20), max_tokens=16, identity="x"))
    harness.step()
    for name in "yz":
        harness.add(make_request(name, range(100, 120), identity=name))
    harness.step()
    who = first_that(harness, R.OTHER_TURN)
    return Wait(harness, who, R.OTHER_TURN, cancels(harness, *({*"ayz"} - {who})))


def surplus_of_prompts() -> Wait:
    """Its identity has its share of the places, and this step has started 60 tokens for it beyond that."""
    harness = harness_of(replace(CAPACITY, max_step_tokens=500), max_step_tokens=0, max_running=8)
    for name in "abcd":
        harness.add(make_request(name, max_tokens=LONG, identity="x"))
    harness.add(make_request("y", max_tokens=LONG, identity="y"))
    harness.step()
    for name in "ef":
        harness.add(make_request(name, range(60), max_tokens=4, identity="x"))
    harness.plan()
    return Wait(harness, "f", R.OTHER_STEP_SHARE, harness.answer)


def share_of_a_heavier_identity() -> Wait:
    harness = harness_of(max_running=4)
    harness.add(make_request("a", max_tokens=LONG, identity="x"))
    harness.step()
    harness.add(make_request("c", identity="x"))
    harness.add(make_request("d", identity="y", weight=3.0))
    harness.plan()
    return Wait(harness, "c", R.OTHER_STEP_SHARE, harness.answer)


def others_prompt_beside_streams() -> Wait:
    harness = harness_of(max_step_tokens=16)
    run_one(harness)
    harness.add(make_request("long", range(100), max_tokens=1))
    harness.step()
    harness.add(make_request("b"))
    harness.step()
    return Wait(harness, "b", R.OTHER_PROMPT, lambda: harness.cancel("long"))


def others_text_that_gets_a_vector() -> Wait:
    harness = harness_of(replace(CAPACITY, hidden_size=16, max_output_bytes=64), max_step_tokens=16)
    harness.add(evaluation("long", 100))
    harness.step()
    harness.add(make_request("b"))
    harness.step()
    return Wait(harness, "b", R.OTHER_PROMPT, lambda: harness.cancel("long"))


def texts_with_the_same_beginning() -> Wait:
    harness = Watched(EngineExecutor(CAPACITY), harness_of().config)
    harness.add(scored("a", 9, 9, 9, shared=40))
    harness.step()
    return Wait(harness, "a", R.PREFIX, lambda: [harness.step() for _ in range(4)])


def completions_of_one_that_is_stopped() -> Wait:
    harness = harness_of(max_step_tokens=16)
    harness.add(make_request("a", range(40), n=3))
    harness.step()
    return Wait(harness, "a", R.PREFIX, lambda: harness.stop("a", 0))


def isolated_one_of_another_identity() -> Wait:
    wait = alone()
    wait.harness.add(make_request("y", identity="y"))
    wait.harness.cancel("b")
    wait.harness.plan()
    return replace(wait, who="y")


def isolated_one_before_it() -> Wait:
    """Both were in flight at two losses, so each has to run alone."""
    harness = harness_of()
    for name in "ab":
        harness.add(make_request(name, max_tokens=LONG))
    harness.step()
    for _ in range(2):
        harness.plan()
        harness.lose()
        harness.now += 0.05
        harness.ready()
    harness.plan()
    return Wait(harness, "b", R.ALONE, lambda: harness.cancel("a"))


# -- an executor -----------------------------------------------------------------------------------


def refused_beside_a_stream(reason: R, cause: RefusalCause | None, **other: bytes) -> Wait:
    """The executor refuses the second opening."""
    harness = harness_of(replace(CAPACITY, max_adapter_slots=4))
    run_one(harness)
    harness.add(make_request("b", **other))  # type: ignore[arg-type]
    plan = harness.plan()
    assert plan is not None
    assert len(plan.openings) == 1
    answer = harness.executor.execute(replace(plan, openings=()))
    rows = [*answer.rows, no_room(cause)]
    return short_of(harness, "b", reason, StepAnswer(plan.number, rows, [], answer.free_pages, 0))


def executor_short_beside_a_stream() -> Wait:
    return refused_beside_a_stream(R.EXECUTOR_SHORT, None)


def grammar_behind_beside_a_stream() -> Wait:
    return refused_beside_a_stream(R.GRAMMAR_BEHIND, RefusalCause.GRAMMAR_BEHIND)


def refused_again(reason: R, cause: RefusalCause | None) -> Wait:
    """Its executor was lost; the next one has no room for it."""
    harness = harness_of()
    run_one(harness)
    harness.lose()
    harness.now += 0.05
    harness.ready()
    return refused_opening(harness, reason, cause)


def executor_short_after_a_loss() -> Wait:
    return refused_again(R.EXECUTOR_SHORT, None)


def grammar_behind_after_a_loss() -> Wait:
    return refused_again(R.GRAMMAR_BEHIND, RefusalCause.GRAMMAR_BEHIND)


def drafts_of_two() -> Wait:
    return drafting("", "", "")


def drafts_of_another_identity() -> Wait:
    return drafting("x", "y")


def lost_before_it_came() -> Wait:
    harness = harness_of()
    harness.lose()
    harness.add(make_request("a"))
    harness.plan()
    return Wait(harness, "a", R.NO_EXECUTOR, harness.ready)


def slot_of_another_client() -> Wait:
    return refused_beside_a_stream(R.ADAPTER_SLOT, RefusalCause.ADAPTER_SLOTS, adapter=b"two")


def deadlines_of_faster_steps() -> Wait:
    return deadlines(row_s=0.01)


def deadlines_of_more_streams() -> Wait:
    return deadlines(row_s=0.01, last=5)


FURTHER_WAITS = (
    *(earlier_one_lacks_pages, earlier_one_has_lost_its_executor, higher_one_lacks_pages),
    *(higher_one_has_no_executor, turn_of_one_without_executor, turn_of_one_without_pages),
    *(surplus_of_prompts, share_of_a_heavier_identity, others_prompt_beside_streams),
    *(others_text_that_gets_a_vector, texts_with_the_same_beginning, completions_of_one_that_is_stopped),
    *(isolated_one_of_another_identity, isolated_one_before_it, executor_short_beside_a_stream),
    *(grammar_behind_beside_a_stream, executor_short_after_a_loss, grammar_behind_after_a_loss),
    *(drafts_of_two, drafts_of_another_identity, lost_before_it_came, slot_of_another_client),
    *(deadlines_of_faster_steps, deadlines_of_more_streams),
)
