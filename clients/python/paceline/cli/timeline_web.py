"""The page of `paceline timeline --web`: an HTTP server on loopback, for whoever has its URL.

The URL has a random path: other users of the machine can't guess it, nor can web pages of others, which may
reach loopback. The page loads nothing from elsewhere.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from google.protobuf.descriptor import FieldDescriptor

from paceline.responses import lower_name
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.steps import check_columns

MAX_STEPS = 250_000
"""Steps that are kept for a page that is opened later, about 30 MB."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES = ("index.html", "timeline.css", "timeline.js", "draw.js", "log.js", "why.js")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the URL is a secret
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_IDLE_S = 10.0

Why = Callable[[str, str], str]
"""What a scheduler says of a request of this id and identity. Raises `paceline.errors`."""


class StepStore:
    """Messages of the step log as JSON, numbered from 1 on. One thread adds, others read."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, bytes]] = deque()  # each with its number of steps
        self._steps = self._added = 0
        self._error = ""
        self._lock = threading.Lock()

    def add(self, log: pb.StepLog) -> None:
        """Append a message, and forget the oldest ones of too many. Raises InternalError for a wrong one."""
        check_columns(log)
        part, steps = _json(log), len(log.started_us)
        with self._lock:
            self._parts.append((steps, part))
            self._added += 1
            self._steps += steps
            while self._steps > MAX_STEPS and len(self._parts) > 1:
                self._steps -= self._parts.popleft()[0]

    def fail(self, error: str) -> None:
        """No more will come, for this reason."""
        self._error = error

    def after(self, number: int) -> bytes:
        """Those after the one of this number, as an object; `next` is the number for the next call."""
        with self._lock:
            fresh = max(0, min(len(self._parts), self._added - number))
            parts = [part for _, part in list(self._parts)[len(self._parts) - fresh :]]
            head = json.dumps({"next": self._added, "error": self._error}).encode()
        return head[:-1] + b', "parts": [' + b",".join(parts) + b"]}"


def _json(log: pb.StepLog) -> bytes:
    """The message's fields, those without a value included."""
    found: dict[str, Any] = {}
    for field in pb.StepLog.DESCRIPTOR.fields:
        value = getattr(log, field.name)
        if field.name == "names":
            found["names"] = [[one.number, one.request_id, one.identity] for one in value]
        elif field.type is not FieldDescriptor.TYPE_MESSAGE:
            found[field.name] = list(value) if field.is_repeated else value
    return json.dumps(found, separators=(",", ":")).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, source: str, store: StepStore, why: Why | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store, self.why = store, why
        self.prefix = f"/{secrets.token_urlsafe(16)}/"
        kinds, reasons = pb.StepEventKind, pb.WaitReason
        about = {
            "source": source,
            "live": why is not None,
            "kinds": _names(kinds, "STEP_EVENT_KIND_"),
            "reasons": _names(reasons, "WAIT_REASON_"),
        }
        self.about = json.dumps(about).encode()

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}{self.prefix}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what a request has failed with, unless a browser has left."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _names(kind: Any, prefix: str) -> list[str]:
    """Of an enum's values, by number."""
    return [lower_name(kind, prefix, number) for number in range(max(kind.values()) + 1)]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _IDLE_S
    protocol_version = "HTTP/1.1"
    server_version = sys_version = ""

    def do_GET(self) -> None:
        """Answer a page that knows the secret path; all others get 404."""
        path, _, asked = self.path.partition("?")
        prefix = self.server.prefix
        if not secrets.compare_digest(path[: len(prefix)].encode(), prefix.encode()):
            self._reply(b"not found", "text/plain", HTTPStatus.NOT_FOUND)
            return
        name = path[len(prefix) :] or "index.html"
        query = {key: values[-1] for key, values in parse_qs(asked).items()}
        if name in _FILES:
            self._reply(_file(name), _TYPES[name.rpartition(".")[2]])
        elif name == "about":
            self._reply(self.server.about)
        elif name == "steps":
            after = query.get("after", "0")
            self._reply(self.server.store.after(int(after) if after.isdecimal() and len(after) < 16 else 0))
        elif name == "why" and self.server.why is not None:
            said = self.server.why(query.get("id", ""), query.get("identity", ""))
            self._reply(json.dumps({"text": said}).encode())
        else:
            self._reply(b"not found", "text/plain", HTTPStatus.NOT_FOUND)

    def _reply(self, body: bytes, kind: str = "application/json", status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        headers = {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the paths are secret."""


def _file(name: str) -> bytes:
    return files("paceline.cli").joinpath("timeline_page", name).read_bytes()


@contextmanager
def page_of(source: str, store: StepStore, why: Why | None) -> Iterator[str]:
    """A context manager: serves the page within the block; gives its URL.

    source: what the page calls it. why: None: of a file, whose requests nobody can be asked about.
    """
    server = _Server(source, store, why)
    thread = threading.Thread(target=server.serve_forever, name="page", daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
