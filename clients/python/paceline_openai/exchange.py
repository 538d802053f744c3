"""One request over ASGI and its answer: the head, the body under a budget, replies and event streams."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from paceline_openai.budget import BodyBudget
from paceline_openai.refusals import Refusal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_ID_END = 96  # characters of `request_id` in the ids of the scheduler, which have 128 at most
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_DRAINED_BYTES = 64 << 10
"""Up to here the body of a refused request is read, and dropped; else the connection is closed."""
_JSON = (b"content-type", b"application/json")


class Disconnected(Exception):
    """The client has left."""


class Exchange:
    """A request and its answer. `request_id` is the client's own `x-request-id`, else a random one."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", ""))  # where it is mounted
        self._query: bytes = scope.get("query_string", b"")
        self._headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            self._headers[name] = value if name not in self._headers else self._headers[name] + b", " + value
        given = self._headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.status = 0  # of the answer; 0: not begun
        self._receive, self._send = receive, send
        self._unread = b"transfer-encoding" in self._headers or self._length() > _DRAINED_BYTES

    def new_id(self, prefix: str) -> str:
        """A new id of a request at the scheduler. `paceline why` takes `request_id`, with which it ends."""
        return f"{prefix}{secrets.token_hex(8)}-{self.request_id[-_ID_END:]}"

    def header(self, name: bytes) -> str:
        """A header's value; "" without it."""
        return self._headers.get(name, b"").decode("latin-1")

    def query(self, name: str) -> str:
        """A value after the path's question mark; "" without it."""
        return parse_qs(self._query.decode("latin-1")).get(name, [""])[-1]

    async def body(self, budget: BodyBudget, owner: bytes, timeout_s: float) -> bytearray:
        """The body. `owner` is whose share of the budget it takes.

        Raises Refusal (413: too long, 429: the budget is used up, 408: too slow), Disconnected.
        """
        with budget.holding(owner, self._length()) as held:
            pieces = bytearray()
            try:
                async with asyncio.timeout(timeout_s):
                    while True:
                        message = await self._receive()
                        if message["type"] == "http.disconnect":
                            raise Disconnected
                        held.grow(len(pieces) + len(message.get("body", b"")))
                        pieces += message.get("body", b"")
                        if not message.get("more_body", False):
                            self._unread = False
                            return pieces
            except TimeoutError:
                text = f"the body was not there after {timeout_s:g} s"
                raise Refusal(HTTPStatus.REQUEST_TIMEOUT, text, code="timeout", close=True) from None

    def _length(self) -> int:
        given = self.header(b"content-length")
        return int(given) if given.isascii() and given.isdigit() and len(given) < 20 else 0

    def warn(self, text: str) -> None:
        """What of the request has no effect, said in a header of the answer."""
        self.extra_headers.append((b"x-paceline-warning", text.encode("ascii", "replace")))

    async def left(self) -> None:
        """Wait until the client has left, or the answer is complete. Only after `body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the head of the answer."""
        self.status = status
        own = [(b"x-request-id", self.request_id.encode()), *self.extra_headers]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the answer's body. Waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def reply(
        self, content: bytes, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = (_JSON,)
    ) -> None:
        """Send a whole answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(content))])
        await self.write(content, more=False)

    async def reply_json(self, value: Any) -> None:
        """Send a value as JSON."""
        await self.reply(json.dumps(value).encode())

    async def refuse(self, refusal: Refusal) -> None:
        """Send an error; in an event stream that has begun, as its last event."""
        if self.status:
            await self.write(b"data: " + refusal.body() + b"\n\n", more=False)
        else:
            headers = [_JSON, *refusal.headers()]
            if self._unread and not refusal.close:
                headers.append((b"connection", b"close"))
            await self.reply(refusal.body(), refusal.status, headers)

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self.start(200, [*headers, (b"x-accel-buffering", b"no")])
