"""Waits that are made on the real core. With those of `further_waits` there are three for each reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.evaluation import Evaluation, EvaluationInput, HiddenPooling
from scheduler_service.core.request import DraftingWish, DraftSource, Request, SamplingSettings
from scheduler_service.core.step import Capacity, Code, RefusalCause, RowAnswer, StepAnswer
from scheduler_service.core.waiting.reasons import WaitReason
from tests.unit.scheduler.engine_executor import EngineExecutor, oracle
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, make_request
from tests.unit.scheduler.test_wait_accounting import Watched

LONG = 60  # tokens of an output that goes on while others wait


@dataclass
class Wait:
    """Request `who` waits for `reason`; `end` makes what it needs available."""

    harness: Watched
    who: str
    reason: WaitReason
    end: Callable[[], object]


def cancels(harness: Watched, *names: str) -> Callable[[], None]:
    """What ends a wait: these requests are cancelled."""

    def end() -> None:
        for name in names:
            harness.cancel(name)

    return end


def harness_of(capacity: Capacity = CAPACITY, **settings: object) -> Watched:
    config = CoreConfig(**{"max_step_tokens": 32, "prefill_chunk_tokens": 16, **settings})  # type: ignore[arg-type]
    return Watched(FakeExecutor(capacity), config)


def run_one(harness: Watched, **other: str | bytes) -> None:
    """Request `a` runs for long."""
    harness.add(make_request("a", max_tokens=LONG, **other))  # type: ignore[arg-type]
    harness.step()


def seats() -> Wait:
    harness = harness_of(max_running=1)
    run_one(harness)
    harness.add(make_request("b"))
    harness.step()
    return Wait(harness, "b", WaitReason.SEATS, lambda: harness.cancel("a"))


def own_earlier() -> Wait:
    wait = seats()
    wait.harness.add(make_request("c"))
    wait.harness.step()
    return replace(wait, who="c", reason=WaitReason.OWN_EARLIER, end=lambda: wait.harness.cancel("b"))


def own_priority() -> Wait:
    wait = seats()
    wait.harness.add(make_request("c", priority=1))
    wait.harness.step()
    return replace(wait, reason=WaitReason.OWN_PRIORITY, end=lambda: wait.harness.cancel("c"))


def other_turn() -> Wait:
    harness = harness_of(max_running=1)
    run_one(harness, identity="x")
    harness.add(make_request("b", identity="y"))
    harness.step()
    harness.add(make_request("c", identity="z"))
    harness.add(make_request("d", identity="v"))
    harness.plan()
    waits = harness.core._pool.waits
    firsts = {live.request.id: waits.reason_of(live.sequences[0]) for live in harness.core._registry}
    who = next(name for name, reason in firsts.items() if reason is WaitReason.OTHER_TURN)
    others = [name for name in firsts if name != who]
    return Wait(harness, who, WaitReason.OTHER_TURN, cancels(harness, *others))


def small(pages: int = 10) -> Capacity:
    return replace(CAPACITY, total_pages=pages, context_length=4 * pages)


def pages() -> Wait:
    harness = harness_of(small())
    harness.add(make_request("a", range(20), max_tokens=16))
    harness.step()
    harness.add(make_request("b", range(100, 120), max_tokens=4))
    harness.step()
    waits = harness.core._pool.waits
    assert (waits.needed, waits.available) == (6, 4)
    return Wait(harness, "b", WaitReason.PAGES, lambda: harness.cancel("a"))


def pages_in_flight() -> Wait:
    wait = pages()
    wait.harness.cancel("a")
    wait.harness.plan()
    return replace(wait, reason=WaitReason.PAGES_IN_FLIGHT, end=wait.harness.answer)


def running_pages() -> Wait:
    harness = harness_of(small())
    for name in "ab":
        harness.add(make_request(name, range(14), max_tokens=20))
    waits = harness.core._pool.waits
    while waits.reason is not WaitReason.RUNNING_PAGES:
        harness.step()
    return Wait(harness, "b", WaitReason.RUNNING_PAGES, lambda: harness.cancel("a"))


def step_budget() -> Wait:
    harness = harness_of()
    for name in "abc":
        harness.add(make_request(name, range(16)))
    harness.plan()
    return Wait(harness, "c", WaitReason.STEP_BUDGET, harness.answer)


def next_step() -> Wait:
    """It came while the step in flight was computed."""
    harness = harness_of()
    run_one(harness)
    harness.plan()
    harness.add(make_request("b"))
    assert harness.plan() is None
    return Wait(harness, "b", WaitReason.STEP_BUDGET, harness.answer)


def other_prompt() -> Wait:
    harness = harness_of(max_step_tokens=16)
    harness.add(make_request("a", range(100), max_tokens=1))
    harness.step()
    harness.add(make_request("b"))
    harness.step()
    return Wait(harness, "b", WaitReason.OTHER_PROMPT, lambda: harness.cancel("a"))


def prefix() -> Wait:
    harness = harness_of(max_step_tokens=16)
    harness.add(make_request("a", range(40), n=2))
    harness.step()
    return Wait(harness, "a", WaitReason.PREFIX, lambda: [harness.step() for _ in range(4)])


def alone() -> Wait:
    harness = harness_of(max_running=1)
    run_one(harness)
    for _ in range(2):
        harness.plan()
        harness.lose()
        harness.now += 0.05
        harness.ready()
    harness.add(make_request("b"))
    harness.plan()
    return Wait(harness, "b", WaitReason.ALONE, lambda: harness.cancel("a"))


def evaluation(name: str, tokens: int = 3) -> Request:
    return Request(
        id=name,
        prompt=(),
        sampling=SamplingSettings(),
        evaluation=Evaluation((EvaluationInput((1,) * tokens, 0),), HiddenPooling.LAST),
    )


def answer_bytes() -> Wait:
    harness = harness_of(replace(CAPACITY, hidden_size=16, max_output_bytes=100))
    harness.add(evaluation("a"))
    harness.add(evaluation("b"))
    harness.plan()
    return Wait(harness, "b", WaitReason.ANSWER_BYTES, harness.answer)


def adapter_slot() -> Wait:
    harness = harness_of(replace(CAPACITY, max_adapter_slots=1))
    run_one(harness, adapter=b"one")
    harness.add(make_request("b", adapter=b"two"))
    harness.step()
    return Wait(harness, "b", WaitReason.ADAPTER_SLOT, lambda: harness.cancel("a"))


def no_room(cause: RefusalCause | None) -> RowAnswer:
    """A row that the executor refuses for now."""
    row = RowAnswer(0, [], code=Code.RESOURCE_EXHAUSTED)
    if cause is not None:
        row.cause = cause
    return row


def short_of(harness: Watched, who: str, reason: WaitReason, answer: StepAnswer) -> Wait:
    """A wait that begins with this answer, and ends with time."""
    harness.answer(answer)
    harness.plan()

    def later() -> None:
        harness.now += 0.05

    return Wait(harness, who, reason, later)


def refused_opening(harness: Watched, reason: WaitReason, cause: RefusalCause | None) -> Wait:
    """The executor refuses the opening of `a`, the step's only row."""
    plan = harness.plan()
    assert plan is not None
    rows = [no_room(cause)]
    return short_of(harness, "a", reason, StepAnswer(plan.number, rows, [], CAPACITY.total_pages, 0))


def refused(cause: RefusalCause | None, reason: WaitReason) -> Wait:
    harness = harness_of()
    harness.add(make_request("a"))
    return refused_opening(harness, reason, cause)


def executor_short() -> Wait:
    return refused(None, WaitReason.EXECUTOR_SHORT)


def grammar_behind() -> Wait:
    return refused(RefusalCause.GRAMMAR_BEHIND, WaitReason.GRAMMAR_BEHIND)


def other_step_share() -> Wait:
    """Its identity has its half of the places, and the step starts a request of the other."""
    harness = harness_of(max_running=4)
    for name in "ab":
        harness.add(make_request(name, max_tokens=LONG, identity="x"))
    harness.step()
    harness.add(make_request("c", identity="x"))
    harness.add(make_request("d", identity="y"))
    harness.plan()
    return Wait(harness, "c", WaitReason.OTHER_STEP_SHARE, harness.answer)


def deadlines(row_s: float = 0.02, last: int = 4) -> Wait:
    """The steps' time is proportional to their rows, and the `last` ones that run have no time for more."""
    harness = harness_of()
    for run, (rows, tokens) in enumerate(((8, 10), (last, 10), (1, 10), (last, LONG))):
        due = harness.now + (2.5 * row_s * rows * tokens if tokens < LONG else 12.5 * last * row_s)
        for row in range(rows):
            harness.add(make_request(f"{run}.{row}", max_tokens=tokens, deadline=due))
        for _ in range(tokens if tokens < LONG else 5):
            harness.plan()
            harness.now += row_s * rows
            harness.answer()
    harness.add(make_request("b", max_tokens=10))
    harness.plan()

    return Wait(harness, "b", WaitReason.DEADLINES, cancels(harness, *(f"3.{row}" for row in range(last))))


def drafting(*identities: str) -> Wait:
    """All that run wait for their drafts, and the step with them."""
    draft = EngineExecutor(CAPACITY, oracle(CAPACITY.context_length, 1.0))
    harness = Watched(EngineExecutor(CAPACITY), draft=draft)
    speculation = DraftingWish(frozenset({DraftSource.EXECUTOR}), 4)
    for at, identity in enumerate(identities[:-1]):
        harness.add(make_request(f"a{at}", max_tokens=LONG, speculation=speculation, identity=identity))
    harness.plan_draft()
    while not all(one.awaits_drafts for one in harness.core._pool.running) or not harness.core.holds_caches:
        if harness.drafting is not None:
            harness.answer_draft()
        else:
            harness.plan()
            harness.answer()
        harness.plan_draft()
    harness.add(make_request("b", identity=identities[-1]))
    harness.plan()
    return Wait(harness, "b", WaitReason.DRAFT_EXECUTOR, harness.answer_draft)


def draft_executor() -> Wait:
    """The only sequence that runs waits for its drafts."""
    return drafting("", "")


def no_executor() -> Wait:
    harness = harness_of()
    run_one(harness)
    harness.lose()
    return Wait(harness, "a", WaitReason.NO_EXECUTOR, harness.ready)


def draining() -> Wait:
    harness = harness_of()
    run_one(harness)
    harness.core.executor_retires()
    harness.add(make_request("b"))
    harness.step()

    def replace_it() -> None:
        harness.lose()
        harness.ready()

    return Wait(harness, "b", WaitReason.NO_EXECUTOR, replace_it)


def first_that(harness: Watched, reason: WaitReason) -> str:
    """The request whose first sequence waits for this."""
    waits = harness.core._pool.waits
    return next(
        one.request.id for one in harness.core._registry if waits.reason_of(one.sequences[0]) is reason
    )


def scored(name: str, *lengths: int, shared: int = 0) -> Request:
    """Texts that are scored; they begin with the same `shared` tokens."""
    texts = [
        (*range(shared), *((at + 7 + i) % 40 for i in range(length))) for at, length in enumerate(lengths)
    ]
    inputs = tuple(EvaluationInput(text, max(1, shared)) for text in texts)
    return Request(
        id=name, prompt=(), sampling=SamplingSettings(), n=len(inputs), prompt_logprobs=0,
        evaluation=Evaluation(inputs),
    )  # fmt: skip


WAITS = (
    *(seats, own_earlier, own_priority, other_turn, pages, pages_in_flight, running_pages, step_budget),
    *(next_step, other_prompt, prefix, alone, answer_bytes, adapter_slot, executor_short, grammar_behind),
    *(no_executor, draining, other_step_share, deadlines, draft_executor),
)
