"""A recorded step log as a file in Chrome's trace format, which chrome://tracing and Perfetto open.

Format: "Trace Event Format" of the Chromium project, JSON object form; times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.steps import RequestEvent, Step

_STEPS, _REQUESTS = 1, 2  # process ids: the rows of the view
_FIGURES = ("planned_us", "prompt_rows", "decode_rows", "verify_rows", "tokens", "accepted_tokens")


def trace(steps: Iterable[Step]) -> str:
    """The file's text: a bar a step, counters, and a row a request with what it did between two events."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in ((_STEPS, "scheduler"), (_REQUESTS, "requests"))
    ]
    names: dict[int, str] = {}
    since: dict[tuple[int, int], tuple[str, int]] = {}  # by request and index: what it does, and from when on
    end_us = 0
    for step in steps:
        names |= {event.number: event.request_id for event in step.events if event.request_id}
        end_us = step.ended_us
        events += _step(step)
        before: dict[int, list[RequestEvent]] = {}  # by request: what it waited for before it was queued
        for event in step.events:
            events += _request(event, end_us, since, before, names)
    for key, (doing, began_us) in since.items():
        events.append(_bar(key, doing, began_us, end_us, names))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _step(step: Step) -> Iterator[dict[str, Any]]:
    figures = {name: getattr(step, name) for name in _FIGURES}
    figures |= {"step": step.number, "blocked_by": step.reason}
    place = {"pid": _STEPS, "tid": 1, "ts": step.started_us}
    yield {"ph": "X", "name": "step", "dur": step.taken_us, "args": figures, **place}
    for name in ("running", "waiting", "free_pages"):
        yield {"ph": "C", "name": name, "args": {name: getattr(step, name)}, **place}


def _request(
    event: RequestEvent,
    now_us: int,
    since: dict[tuple[int, int], tuple[str, int]],
    before: dict[int, list[RequestEvent]],
    names: dict[int, str],
) -> Iterator[dict[str, Any]]:
    """The bars that an event ends; `since` gets what it begins. A failure ends all completions."""
    if event.kind in ("callers_turn", "tokenizing", "grammar_compiling"):
        before.setdefault(event.number, []).append(event)
        return
    arrived_us = now_us
    for part in reversed(before.pop(event.number, ())):
        arrived_us -= part.value
        yield _bar((event.number, 0), part.kind, arrived_us, arrived_us + part.value, names)
    ends = [(event.number, event.completion)]
    if event.kind == "refused":
        ends = [key for key in since if key[0] == event.number]
    for key in ends:
        if (former := since.pop(key, None)) is not None:
            yield _bar(key, *former, now_us, names)
    if event.kind in ("queued", "preempted"):
        since[event.number, event.completion] = "waits", now_us
    elif event.kind in ("admitted", "resumed"):
        since[event.number, event.completion] = "runs", now_us


def _bar(
    key: tuple[int, int], doing: str, began_us: int, end_us: int, names: dict[int, str]
) -> dict[str, Any]:
    number, index = key
    whose = {"request": names.get(number, f"#{number}"), "completion": index}
    place = {"pid": _REQUESTS, "tid": number}
    return {"ph": "X", "name": doing, "ts": began_us, "dur": end_us - began_us, "args": whose, **place}
