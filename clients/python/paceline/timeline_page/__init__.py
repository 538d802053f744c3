"""The timeline's page: its files, and what they ask for as JSON.

`paceline timeline --web` and the OpenAI API's process serve it, each below a path of its own, with:

    about               what it is of, and may be of, and the names of the numbers in the log
    steps?after=NUMBER  what of the log is new since the answer that had this number as `next`; 0: all
    why?id=ID           what the scheduler says of a request; with `identity`, of another's

All have `of`: the value of one of the `choices` in `about`, or "".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from paceline.responses import lower_name
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.steps import check_columns
from paceline.types import Waits

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FILES: Mapping[str, str] = {
    name: f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8"
    for name in (*("index.html", "timeline.css", "timeline.js", "ask.js", "draw.js", "log.js", "why.js"),)
}
"""The page's files, and their content types."""
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the URL may be a secret
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of all answers."""


def file(name: str) -> bytes:
    """One of FILES."""
    return files(__name__).joinpath(name).read_bytes()


def about(source: str, *, live: bool, choices: Sequence[tuple[str, str]] = ()) -> bytes:
    """The answer to `about`. source: what the page calls it. live: more steps come, and `why` is answered.

    choices: what it may be of, if there are several: values of `of`, each with its name.
    """
    kinds, reasons = pb.StepEventKind, pb.WaitReason
    names = {"kinds": _names(kinds, "STEP_EVENT_KIND_"), "reasons": _names(reasons, "WAIT_REASON_")}
    return json.dumps({"source": source, "live": live, "choices": choices, **names}).encode()


def part(log: pb.StepLog) -> bytes:
    """A message of the log: its fields, those without a value included. Raises InternalError."""
    check_columns(log)
    found: dict[str, Any] = {}
    for field in pb.StepLog.DESCRIPTOR.fields:
        value = getattr(log, field.name)
        if field.name == "names":
            found["names"] = [[one.number, one.request_id, one.identity] for one in value]
        elif field.type is not FieldDescriptor.TYPE_MESSAGE:
            found[field.name] = list(value) if field.is_repeated else value
    return json.dumps(found, separators=(",", ":")).encode()


def steps(parts: Iterable[bytes], following: int, error: str = "") -> bytes:
    """The answer to `steps`. following: its `next`."""
    head = json.dumps({"next": following, "error": error}).encode()
    return head[:-1] + b', "parts": [' + b",".join(parts) + b"]}"


def why(found: Waits) -> str:
    """What is shown of the answer to `why`."""
    return " ".join(one.explanation for one in found.requests) or "It knows this request no more."


def _names(kind: Any, prefix: str) -> list[str]:
    """Of an enum's values, by number."""
    return [lower_name(kind, prefix, number) for number in range(max(kind.values()) + 1)]
