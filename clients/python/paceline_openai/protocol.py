"""HTTP/1.1 of one connection: uvicorn's with httptools, with the bounds that those lack.

Both read heads of any size at any pace, queue any number of requests that come at once, and wait for ever for
clients that read nothing.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline_openai.settings import Bounds

_MAX_PIPELINED = 8
"""Requests that may wait on a connection for an earlier one's answer."""
_MAX_PIPELINED_BYTES = 32 << 10
"""Of the body of one that waits. Of 64 KiB the rest would not be read, nor that the client leaves."""
_MAX_CHUNKS = 1 << 14
"""Of a body. A chunk of a byte costs as much time as one of 64 KiB."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection under bounds. `connections` is of all of the process's."""

    bounds: Bounds  # set by `bounded`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = self._head_count = self._requests = self._chunks = 0
        self._running: Any = None  # the request that is being answered; `cycle` is the last one that has come
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_last = False  # the last request of the connection is there

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse it where there are too many; else its first head must come soon."""
        super().connection_made(transport)
        if len(self.connections) > self.bounds.max_connections:
            transport.abort()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self._head_done()
        self._stop_stall_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        for cycle in (self._running, self.cycle, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        """Parse; what is no HTTP is answered with 400, and is no line of the log."""
        self._unset_keepalive_if_required()
        if self.parser is None or self.transport.is_closing() or self._is_last:
            return
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as offered:
                    data = data[offered.args[0] :]
                    self._decline_upgrade()
        except _TooMuch as error:
            self._refuse(error.status, error.message)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if self._is_last:
                return
            if isinstance(cause, _TooMuch):
                self._refuse(cause.status, cause.message)
            else:
                self._refuse(400, "this is no HTTP request")

    def on_message_begin(self) -> None:
        """A head begins."""
        self._head_bytes = self._head_count = self._chunks = 0
        self._requests += 1
        if self._requests > self.bounds.max_connection_requests:
            raise _TooMuch(429, "too many requests on one connection: open another")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after a chunked body, which nobody reads."""
        self._head_count += 1
        if self._head_count > self.bounds.max_headers:
            raise _TooMuch(431, f"more than {self.bounds.max_headers} headers")
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._head_done()
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _TooMuch(429, "too many requests at once on one connection")
        super().on_headers_complete()
        self.flow.resume_reading()  # else nobody would see that the client leaves
        if self._requests >= self.bounds.max_connection_requests:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > _MAX_PIPELINED_BYTES:
            raise _TooMuch(413, "the body is too large for a request after another one on its connection")

    def on_chunk_header(self) -> None:
        """A part of a body whose length was not said before."""
        self._chunks += 1
        if self._chunks > _MAX_CHUNKS:
            raise _TooMuch(413, f"the body has more than {_MAX_CHUNKS:,} chunks")

    def on_message_complete(self) -> None:
        """The body is there, or the parser leaves it to the protocol that an upgrade is offered to."""
        if not (self.parser.should_upgrade() and self._framing()):
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The next head need not come soon, but what has come of one must become whole."""
        super().on_response_complete()
        self._stop_stall_timer()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered: it has some time to read again."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.bounds.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        self._stop_stall_timer()
        super().resume_writing()

    def _framing(self) -> bytes:
        """The headers that tell the body's end; none: there is no body."""
        framing = (b"content-length", b"transfer-encoding")
        return b"".join(b"%s: %s\r\n" % one for one in self.headers if one[0] in framing)

    def _decline_upgrade(self) -> None:
        """Go on with the request that offers one, as Java's clients do: another parser reads its body."""
        if framing := self._framing():
            self.cycle.keep_alive = False
            body = SimpleNamespace(
                on_body=self.on_body,
                on_chunk_header=self.on_chunk_header,
                on_message_complete=self._last_complete,
            )
            self.parser = httptools.HttpRequestParser(body)
            self.parser.feed_data(b"POST / HTTP/1.1\r\nconnection: close\r\n%s\r\n" % framing)

    def _last_complete(self) -> None:
        """The request is there whose answer ends the connection: nothing after it is read."""
        self._is_last = True
        self.on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.bounds.max_header_bytes:
            raise _TooMuch(431, f"the headers have more than {self.bounds.max_header_bytes:,} bytes")

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.bounds.header_timeout_s, self._late_head)

    def _late_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"no whole head of a request in {self.bounds.header_timeout_s:g} s")

    def _head_done(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless another answer is under way, and close."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not (self.pipeline or cycle.response_started):
            cycle.disconnected = cycle.response_complete = True  # its body is what is refused
            cycle.message_event.set()
        if cycle is None or cycle.response_complete:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": error}).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
                body
            )
            self.transport.write(STATUS_LINE[status] + head + body)
            self.transport.close()
        else:
            self.transport.abort()


class _TooMuch(Exception):
    """A bound of a request's head or a connection."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def bounded(given: Bounds) -> type[BoundedProtocol]:
    """The protocol with these bounds."""
    return type("BoundedProtocol", (BoundedProtocol,), {"bounds": given})
