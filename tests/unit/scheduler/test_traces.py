"""Replays tests/traces/*.txt: what happens stands at the left margin, what the core does about it indented.

The executors are fake ones. `pytest tests/unit/scheduler --refresh-traces` writes what the core does
now; the difference is then for a human to judge.

    config step_tokens=8 ...            of CoreConfig, before the executor
    executor pages=8 page_size=4 ...    of Capacity; an executor like this is ready
    draft pages=8 agreement=0.9 ...     of Capacity; a draft executor, right at this share of the positions
    text repeat=4 share=0.9             before them: what the models say repeats after so many tokens,
                                        but for some positions
    add a prompt=6 max_tokens=4 ...     of Request; prompt is its length, drafts=ngram or drafts=executor
    cancel a | stop a.0 | lose | lose_draft | wait 1.5
    plan | answer                       one step in its two halves
    step [count]                        both, once or more, after all drafts were made
    run                                 until nothing is left to do

A plan tells the executor's free pages as of its last answer, and how many of them are reserved for steps in
flight. Each token is also held to the text: it is the one that follows, whatever was drafted, forked or lost.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import AdmissionError
from scheduler_service.core.events import CompletionEnded, Event, Failed, Tokens
from scheduler_service.core.request import DraftingWish, DraftSource, index_seed
from scheduler_service.core.step import CacheFork, CacheOpening, CacheRow, Capacity, PlannedStep, StepAnswer
from tests.unit.scheduler.fake_executor import FakeExecutor, Text, agreeing, next_token, repeating
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request, parts

TRACES = Path(__file__).parents[2] / "traces"
SHORT = {
    "pages": "total_pages",
    "sequences": "max_sequences",
    "rows": "max_rows",
    "step_tokens": "max_step_tokens",
}
SHORT_CONFIG = {
    "step_tokens": "max_step_tokens",
    "chunk": "prefill_chunk_tokens",
    "places": "max_running",
    "in_flight": "max_in_flight",
}
DRAFTERS = {"ngram": DraftSource.NGRAM, "executor": DraftSource.EXECUTOR}


class Recorder(Harness):
    """A harness that writes down plans and events."""

    def __init__(self, executor: FakeExecutor, config: CoreConfig | None) -> None:
        self.lines: list[str] = []
        self.names: dict[int, str] = {}  # of each cache that there was
        self.draft_names: dict[int, str] = {}
        super().__init__(executor, config)

    def plan(self) -> PlannedStep | None:
        free, reserved = self.core.snapshot().free_pages, self.core._target.in_flight.pages
        plan = super().plan()
        if plan is not None:
            opened_caches: list[CacheOpening | CacheFork] = [*plan.openings, *plan.forks]
            for opened in opened_caches:
                request_id, index = self.owner[opened.cache_id]
                self.names[opened.cache_id] = f"{request_id}.{index}#{opened.cache_id}"
            pages = f"free pages {free}" + (f", reserved {reserved}" if reserved else "")
            self.write(f"plan {plan.number}, {pages}:", *describe_plan(plan, self.names.__getitem__))
        return plan

    def plan_draft(self) -> PlannedStep | None:
        plan = super().plan_draft()
        if plan is not None:
            for opening in plan.openings:
                running = self.core._pool.running
                owner = next(s for s in running if tuple(s.tokens) == opening.tokens)
                name = f"{owner.live.request.id}.{owner.index}#{opening.cache_id}"
                self.draft_names[opening.cache_id] = name
            assert isinstance(self.draft, FakeExecutor)
            title = f"draft plan {plan.number}, free pages {self.draft.free}:"
            self.write(title, *describe_plan(plan, self.draft_names.__getitem__))
        return plan

    def answer(self, result: StepAnswer | None = None) -> list[Event]:
        plan = self.unanswered[0]
        result = result or self.executor.execute(plan)
        if self.config.max_in_flight > 1:
            self.write(f"answer {plan.number}")
        for part, answer in zip(parts(plan), result.rows, strict=True):
            name = self.names[part.cache_id]
            request_id, index = name.partition("#")[0].split(".")
            if self.ended((request_id, int(index))):
                self.write(f"{name} had ended: computed for nothing")
            elif isinstance(part, CacheRow) and part.drafts:
                accepted = f"accepted {len(answer.tokens) - 1} of {len(part.drafts)}"
                self.write(f"{name} {accepted}, KV length {answer.kv_length}")
        return super().answer(result)

    def answer_draft(self, result: StepAnswer | None = None) -> None:
        assert self.draft is not None
        assert self.drafting is not None
        plan = self.drafting
        result = result or self.draft.execute(plan)
        for part, answer in zip(parts(plan), result.rows, strict=True):
            drafted = f"drafted {' '.join(map(str, answer.tokens))}" if answer.tokens else "drafted nothing"
            self.write(f"{self.draft_names[part.cache_id]} {drafted}, KV length {answer.kv_length}")
        super().answer_draft(result)

    def write(self, *lines: str) -> None:
        self.lines += [f"    {line}" for line in lines]

    def _take(self, events: list[Event]) -> None:  # type: ignore[override]
        super()._take(events)
        self.write(*map(describe_event, events))


def describe_plan(plan: PlannedStep, name: Callable[[int], str]) -> list[str]:
    lines = []
    if plan.releases:
        lines.append("  release " + " ".join(f"#{cache_id}" for cache_id in plan.releases))
    lines += [f"  truncate {name(cut.cache_id)} to {cut.length}" for cut in plan.truncates]
    lines += [f"  fork {name(f.cache_id)} from #{f.source_id} at {f.length}" for f in plan.forks]
    for row in plan.rows:
        what = f"chunk of {row.limit}" if row.limit else f"feed {len(row.tokens)}" if row.tokens else "decode"
        if row.drafts:
            what = "verify"
        line = f"  {what} {name(row.cache_id)} at {row.kv_length}"
        if row.drafts:
            line += f": {' '.join(map(str, row.drafts))}"
        lines.append(line if row.steps == 1 else f"{line}, {row.steps} steps")
    for opening in plan.openings:
        lines.append(f"  open {name(opening.cache_id)}: {opening.limit} of {len(opening.tokens)}")
    return lines


def describe_event(event: Event) -> str:
    if isinstance(event, Failed):
        return f"{event.request_id} failed: {event.failure.value}, {event.message}"
    who = f"{event.request_id}.{event.index}"
    if isinstance(event, Tokens):
        return f"{who} + {' '.join(map(str, event.ids))}"
    assert isinstance(event, CompletionEnded), "no trace has evaluations"
    tokens, preemptions = event.usage.completion_tokens, event.usage.preemptions
    return f"{who} finished: {event.reason.value}, {tokens} tokens, {preemptions} preemptions"


def fields(words: list[str], short: dict[str, str]) -> dict[str, object]:
    pairs = (word.split("=") for word in words)
    return {short.get(name, name): ast.literal_eval(value) for name, value in pairs}


def capacity_of(values: dict[str, object]) -> Capacity:
    return Capacity(**({name: getattr(CAPACITY, name) for name in CAPACITY.__slots__} | values))


def replay(commands: list[str]) -> str:
    recorder: Recorder | None = None
    config: CoreConfig | None = None
    text: Text = next_token
    lines: list[str] = []
    for command in commands:
        lines.append(command)
        words = command.partition("#")[0].split()
        match words:
            case []:
                continue
            case ["config", *rest]:
                config = CoreConfig(**fields(rest, SHORT_CONFIG))  # type: ignore[arg-type]
                continue
            case ["text", *rest]:
                text = repeating(**fields(rest, {"repeat": "period"}))  # type: ignore[arg-type]
                continue
            case ["executor", *rest]:
                executor = FakeExecutor(capacity_of(fields(rest, SHORT)), text)
                if recorder is None:
                    recorder = Recorder(executor, config)
                else:
                    recorder.executor = executor
                    recorder.ready()
            case ["draft", *rest]:
                assert recorder is not None, "the executor comes first"
                values = fields(rest, SHORT)
                share = float(values.pop("agreement"))  # type: ignore[arg-type]
                recorder.draft = FakeExecutor(capacity_of(values), agreeing(text, share))
                recorder.core.draft_ready(recorder.draft.capacity)
            case _:
                assert recorder is not None, "the executor comes first"
                perform(recorder, words)
        lines += recorder.lines
        recorder.lines = []
    assert recorder is not None, "the trace has no executor"
    check_tokens(recorder, text)
    return "\n".join(lines) + "\n"


def check_tokens(recorder: Recorder, text: Text) -> None:
    """All completions say what the text says, as far as they go."""
    for (request_id, index), tokens in recorder.tokens.items():
        request = recorder.requests[request_id]
        seed = index_seed(request.sampling.seed, index)
        known = [*request.prompt, *tokens]
        for at in range(len(request.prompt), len(known)):
            assert known[at] == text(seed, known[:at])


def perform(recorder: Recorder, words: list[str]) -> None:
    match words:
        case ["add", name, *rest]:
            values = fields([word for word in rest if not word.startswith("drafts=")], {})
            drafters = [DRAFTERS[word.partition("=")[2]] for word in rest if word.startswith("drafts=")]
            length = values.pop("draft_length", None)
            values["speculation"] = DraftingWish(frozenset(drafters), length)  # type: ignore[arg-type]
            prompt = range(int(values.pop("prompt")))  # type: ignore[call-overload]
            try:
                recorder.add(make_request(name, prompt, arrival=recorder.now, **values))  # type: ignore[arg-type]
            except AdmissionError as error:
                recorder.lines.append(f"    {type(error).__name__}: {error}")
        case ["cancel", name]:
            recorder.cancel(name)
        case ["stop", name]:
            request_id, index = name.split(".")
            recorder.stop(request_id, int(index))
        case ["lose"]:
            recorder.lose()
        case ["lose_draft"]:
            recorder.lose_draft()
        case ["wait", seconds]:
            recorder.now += float(seconds)
        case ["plan"]:
            recorder.plan()
        case ["answer"]:
            recorder.answer()
        case ["step", *count]:
            for _ in range(int(count[0]) if count else 1):
                recorder.step()
        case ["run"]:
            recorder.run()
        case _:
            raise AssertionError(f"what does {' '.join(words)} mean?")


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.txt")), ids=lambda path: path.stem)
def test_the_core_does_what_the_trace_says(path: Path, request: pytest.FixtureRequest) -> None:
    recorded = path.read_text()
    commands = [line for line in recorded.splitlines() if not line.startswith("    ")]
    happened = replay(commands)
    if request.config.getoption("--refresh-traces", default=False):
        path.write_text(happened)
    else:
        assert happened == recorded


def test_there_are_traces() -> None:
    assert list(TRACES.glob("*.txt"))
