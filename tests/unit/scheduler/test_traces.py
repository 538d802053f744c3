"""Replays tests/traces/*.txt: what happens stands at the left margin, what the core does about it indented.

The executor is the fake one. `pytest tests/unit/scheduler --refresh-traces` writes what the core does
now; the difference is then for a human to judge.

    executor pages=8 page_size=4 ...    of Capacity; an executor like this is ready (the first line)
    config step_tokens=8 ...            of CoreConfig, before the executor
    add a prompt=6 max_tokens=4 ...     of Request; prompt is its length
    cancel a | stop a.0 | lose | wait 1.5
    plan | answer                       one step in its two halves
    step [count]                        both, once or more
    run                                 until nothing is left to do
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.errors import AdmissionError
from scheduler_service.core.events import Event, Failed, Tokens
from scheduler_service.core.step import Capacity, PlannedStep
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request

TRACES = Path(__file__).parents[2] / "traces"
SHORT = {
    "pages": "total_pages",
    "sequences": "max_sequences",
    "rows": "max_rows",
    "step_tokens": "max_step_tokens",
}
SHORT_CONFIG = {"step_tokens": "max_step_tokens", "chunk": "prefill_chunk_tokens", "seats": "max_running"}


class Recorder(Harness):
    """A harness that writes down plans and events."""

    def __init__(self, executor: FakeExecutor, config: CoreConfig | None) -> None:
        self.lines: list[str] = []
        super().__init__(executor, config)

    def plan(self) -> PlannedStep | None:
        plan = super().plan()
        if plan is not None:
            self.lines += [f"    {line}" for line in describe_plan(plan, self)]
        return plan

    def _take(self, events: list[Event]) -> None:  # type: ignore[override]
        super()._take(events)
        self.lines += [f"    {describe_event(event)}" for event in events]


def describe_plan(plan: PlannedStep, harness: Harness) -> list[str]:
    def name(cache_id: int) -> str:
        return ".".join(map(str, harness.owner[cache_id])) + f"#{cache_id}"

    lines = [f"plan {plan.number}:"]
    if plan.releases:
        lines.append("  release " + " ".join(f"#{cache_id}" for cache_id in plan.releases))
    lines += [f"  fork {name(f.cache_id)} from #{f.source_id} at {f.length}" for f in plan.forks]
    for row in plan.rows:
        what = f"chunk of {row.limit}" if row.limit else f"feed {len(row.tokens)}" if row.tokens else "decode"
        lines.append(f"  {what} {name(row.cache_id)} at {row.kv_length}")
    for opening in plan.openings:
        lines.append(f"  open {name(opening.cache_id)}: {opening.limit} of {len(opening.tokens)}")
    return lines


def describe_event(event: Event) -> str:
    if isinstance(event, Failed):
        return f"{event.request_id} failed: {event.failure.value}, {event.message}"
    who = f"{event.request_id}.{event.index}"
    if isinstance(event, Tokens):
        return f"{who} + {' '.join(map(str, event.ids))}"
    tokens, preemptions = event.usage.completion_tokens, event.usage.preemptions
    return f"{who} finished: {event.reason.value}, {tokens} tokens, {preemptions} preemptions"


def fields(words: list[str], short: dict[str, str]) -> dict[str, object]:
    pairs = (word.split("=") for word in words)
    return {short.get(name, name): ast.literal_eval(value) for name, value in pairs}


def replay(commands: list[str]) -> str:
    recorder: Recorder | None = None
    config: CoreConfig | None = None
    lines: list[str] = []
    for command in commands:
        lines.append(command)
        words = command.partition("#")[0].split()
        if not words:
            continue
        if words[0] == "config":
            config = CoreConfig(**fields(words[1:], SHORT_CONFIG))  # type: ignore[arg-type]
            continue
        if words[0] == "executor":
            values = {name: getattr(CAPACITY, name) for name in CAPACITY.__slots__}
            executor = FakeExecutor(Capacity(**(values | fields(words[1:], SHORT))))
            if recorder is None:
                recorder = Recorder(executor, config)
            else:
                recorder.executor = executor
                recorder.ready()
        else:
            assert recorder is not None, "the first line is an executor's"
            perform(recorder, words)
        lines += recorder.lines
        recorder.lines = []
    return "\n".join(lines) + "\n"


def perform(recorder: Recorder, words: list[str]) -> None:
    match words:
        case ["add", name, *rest]:
            values = fields(rest, {})
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
