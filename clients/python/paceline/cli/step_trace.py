"""A recorded step log as a file in Chrome's trace format, which chrome://tracing and Perfetto open.

Format: "Trace Event Format" of the Chromium project, JSON object form; times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.responses import lower_name
from paceline.scheduler.v1 import scheduler_pb2 as pb

_STEPS, _REQUESTS = 1, 2  # process ids: the rows of the view


def starts_us(log: pb.StepLog) -> Iterator[int]:
    """When each step was sent, microseconds since 1970."""
    at = log.started_at_us
    for later in log.started_us:
        at += later
        yield at


def trace(logs: Iterable[pb.StepLog]) -> str:
    """The file's text: a bar a step, counters, and a row a request with what it did between two events."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in ((_STEPS, "scheduler"), (_REQUESTS, "requests"))
    ]
    names: dict[int, str] = {}
    since: dict[tuple[int, int], tuple[str, int]] = {}  # by request and index: what it does, and from when on
    end_us = 0
    for log in logs:
        names |= {one.number: one.request_id for one in log.names}
        first = 0
        for at, start_us in enumerate(starts_us(log)):
            end_us = start_us + log.taken_us[at]
            events += _step(log, at, start_us)
            for event in range(first, first + log.event_counts[at]):
                events += _request(log, event, end_us, since, names)
            first += log.event_counts[at]
    for key, (doing, began_us) in since.items():
        events.append(_bar(key, doing, began_us, end_us, names))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _step(log: pb.StepLog, at: int, start_us: int) -> Iterator[dict[str, Any]]:
    reason = lower_name(pb.WaitReason, "WAIT_REASON_", log.reasons[at]) if log.reasons[at] else ""
    figures = {
        name: getattr(log, name)[at]
        for name in ("planned_us", "prompt_rows", "decode_rows", "verify_rows", "tokens", "accepted_tokens")
    }
    figures |= {"step": log.first_step + at, "blocked_by": reason}
    place = {"pid": _STEPS, "tid": 1}
    yield {"ph": "X", "name": "step", "ts": start_us, "dur": log.taken_us[at], "args": figures, **place}
    for name in ("running", "waiting", "free_pages"):
        yield {"ph": "C", "name": name, "ts": start_us, "args": {name: getattr(log, name)[at]}, **place}


def _request(
    log: pb.StepLog,
    at: int,
    now_us: int,
    since: dict[tuple[int, int], tuple[str, int]],
    names: dict[int, str],
) -> Iterator[dict[str, Any]]:
    """The bars that an event ends; `since` gets what it begins. An end of index 0 by a failure ends all."""
    kind, number, index = log.event_kinds[at], log.event_requests[at], log.event_indexes[at]
    ends = [(number, index)]
    if kind == pb.STEP_EVENT_KIND_REFUSED:
        ends = [key for key in since if key[0] == number]
    for key in ends:
        if (former := since.pop(key, None)) is not None:
            yield _bar(key, *former, now_us, names)
    match kind:
        case pb.STEP_EVENT_KIND_QUEUED | pb.STEP_EVENT_KIND_PREEMPTED:
            since[number, index] = "waits", now_us
        case pb.STEP_EVENT_KIND_ADMITTED | pb.STEP_EVENT_KIND_RESUMED:
            since[number, index] = "runs", now_us


def _bar(
    key: tuple[int, int], doing: str, began_us: int, end_us: int, names: dict[int, str]
) -> dict[str, Any]:
    number, index = key
    whose = {"request": names.get(number, f"#{number}"), "completion": index}
    place = {"pid": _REQUESTS, "tid": number}
    return {"ph": "X", "name": doing, "ts": began_us, "dur": end_us - began_us, "args": whose, **place}
