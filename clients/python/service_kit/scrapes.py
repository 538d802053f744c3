"""The port at which metrics are scraped: HTTP without TLS or a token, in one thread with few connections.

What is answered is a WSGI application's matter, such as prometheus_client's; here is who may keep a
connection open, and for how long. Each connection has one request.
"""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.client import HTTPException, HTTPMessage, parse_headers
from importlib import metadata
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from service_kit.logs import Log

log = Log(__name__)

MAX_CONNECTIONS = 16
REQUEST_S = 5.0
"""For a request to be complete, and again for its answer to be taken."""
MAX_REQUEST_BYTES = 16 << 10
_BACKLOG = 128
_READ_BYTES = 4096
_NO_DESCRIPTORS_S = 0.1

App: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def describe_process(registry: CollectorRegistry, prefix: str) -> None:
    """Add `process_*` (CPU time, memory, descriptors, start) of this process, and its Paceline's version."""
    ProcessCollector(registry=registry)
    try:
        version = metadata.version("paceline")
    except metadata.PackageNotFoundError:
        version = "dev"
    info = Gauge(f"{prefix}_build_info", "1; the label has the version", ["version"], registry=registry)
    info.labels(version).set(1)


class ScrapePort:
    """Answers requests by `app`. At the bound, the connection longest without a request is closed."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._waiting: dict[asyncio.Task[None], None] = {}  # without a complete request, the longest first
        self._answering: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._listener: socket.socket
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def open(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.settimeout(0)
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Close the port and all of its connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._waiting) + len(self._answering)

    def _run(self) -> None:
        """Run the event loop until `close` stops it, then end the connections: the function of the thread."""
        accepting = self._loop.create_task(self._accept())
        self._loop.run_forever()
        tasks = accepting, *self._waiting, *self._answering
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._listener.close()
        self._loop.close()

    async def _accept(self) -> None:
        """Take connections, each with a task of its own, until cancelled."""
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("the metrics port takes no connection", error=str(error))
                await asyncio.sleep(_NO_DESCRIPTORS_S)
                continue
            connection.settimeout(0)
            if self.connections >= MAX_CONNECTIONS:
                self._make_room()
            task = self._loop.create_task(self._serve(connection))
            self._waiting[task] = None
            await asyncio.sleep(0)  # it reads what has come already, before it may be closed for the next

    def _make_room(self) -> None:
        """Close the connection that is longest without a complete request, or else one that is answered."""
        chosen = next(iter(self._waiting or self._answering))
        chosen.cancel()
        self._waiting.pop(chosen, None)
        self._answering.discard(chosen)

    async def _serve(self, connection: socket.socket) -> None:
        """Read one request, answer it, and close the connection."""
        task = asyncio.current_task()
        assert task is not None
        try:
            with connection, suppress(OSError, TimeoutError):
                async with asyncio.timeout(REQUEST_S):
                    head = await self._request(connection)
                if head is None:
                    return
                self._waiting.pop(task, None)
                self._answering.add(task)
                async with asyncio.timeout(REQUEST_S):
                    await self._loop.sock_sendall(connection, self._answer(head))
        finally:
            self._waiting.pop(task, None)
            self._answering.discard(task)

    async def _request(self, connection: socket.socket) -> bytes | None:
        """Up to the empty line; None if the peer has left or sends too much."""
        head = b""
        while b"\r\n\r\n" not in head:
            more = await self._loop.sock_recv(connection, _READ_BYTES)
            head += more
            if not more or len(head) > MAX_REQUEST_BYTES:
                return None
        return head

    def _answer(self, head: bytes) -> bytes:
        try:
            environ = _environ(head)
        except (ValueError, HTTPException):
            return _written("400 Bad Request", [], b"")
        started: list[Any] = []
        try:
            body = b"".join(
                self._app(environ, lambda *status_and_headers: started.extend(status_and_headers))
            )
        except Exception as error:
            log.error("a scrape failed", error)
            return _written("500 Internal Server Error", [], b"")
        return _written(started[0], started[1], body if environ["REQUEST_METHOD"] != "HEAD" else b"")


def _environ(head: bytes) -> dict[str, Any]:
    """What PEP 3333 asks for and an application of metrics reads. Raises ValueError, HTTPException."""
    file = io.BytesIO(head)
    method, target, version = file.readline().decode("latin-1").split()
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    headers: HTTPMessage = parse_headers(file)
    path, _, query = target.partition("?")
    given = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
    return {**given, "REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}


def _written(status: str, headers: Iterable[tuple[str, str]], body: bytes) -> bytes:
    """An answer, after which the connection is closed."""
    all_headers = [*headers, ("Content-Length", str(len(body))), ("Connection", "close")]
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in all_headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
