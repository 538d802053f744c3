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
from typing import Any
from urllib.parse import parse_qs

from paceline import timeline_page
from paceline.scheduler.v1 import scheduler_pb2 as pb

MAX_STEPS = 250_000
"""Steps that are kept for a page that is opened later, about 30 MB."""
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
        part, steps = timeline_page.part(log), len(log.started_us)
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
            return timeline_page.steps(parts, self._added, self._error)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, source: str, store: StepStore, why: Why | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store, self.why = store, why
        self.prefix = f"/{secrets.token_urlsafe(16)}/"
        self.about = timeline_page.about(source, live=why is not None)

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}{self.prefix}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what a request has failed with, unless a browser has left."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


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
            self._reply(b"not found", "text/plain; charset=utf-8", HTTPStatus.NOT_FOUND)
            return
        name = path[len(prefix) :] or "index.html"
        query = {key: values[-1] for key, values in parse_qs(asked).items()}
        if name in timeline_page.FILES:
            self._reply(timeline_page.file(name), timeline_page.FILES[name])
        elif name == "about":
            self._reply(self.server.about)
        elif name == "steps":
            after = query.get("after", "0")
            self._reply(self.server.store.after(int(after) if after.isdecimal() and len(after) < 16 else 0))
        elif name == "why" and self.server.why is not None:
            said = self.server.why(query.get("id", ""), query.get("identity", ""))
            self._reply(json.dumps({"text": said}).encode())
        else:
            self._reply(b"not found", "text/plain; charset=utf-8", HTTPStatus.NOT_FOUND)

    def _reply(self, body: bytes, kind: str = "application/json", status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        headers = {**timeline_page.HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the paths are secret."""


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
