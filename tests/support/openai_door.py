"""The OpenAI API's door in the test's own process, on a port of loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.aio import Client
from paceline.channel import Security
from paceline.failover import FAILOVER_TIMEOUT_S
from paceline_openai import Bounds, Gateway
from paceline_openai.beginnings import EXTRA_STREAMS
from paceline_openai.server import Server


@dataclass
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Of a stream; the last one must be [DONE]."""
        found = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        assert found.pop() == "[DONE]", self.body
        return [json.loads(one) for one in found]


@dataclass
class Door:
    """A door that serves. `app` is what it serves."""

    app: Gateway
    port: int
    key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    async def ask(self, path: str, body: Any = None, *, key: str | None = None, **headers: str) -> Answer:
        """POST `body` as JSON (bytes: as they are), or GET without one; headers by name, _ for -."""
        given = self.key if key is None else key
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if given:
            sent.setdefault("authorization", f"Bearer {given}")
        content = b""
        if body is not None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        head = [
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
            "host: 127.0.0.1",
            "connection: close",
        ]
        head += [f"content-length: {len(content)}", *(f"{name}: {value}" for name, value in sent.items())]
        return await self.raw("\r\n".join(head).encode() + b"\r\n\r\n" + content)

    async def raw(self, sent: bytes) -> Answer:
        """The answer to these bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            async with asyncio.timeout(60):
                return answer_of(await reader.read())
        finally:
            writer.close()

    async def chat(self, content: str, **fields: Any) -> Answer:
        """A chat of one message."""
        given = {"messages": [{"role": "user", "content": content}], **fields}
        return await self.ask("/v1/chat/completions", given)

    async def complete(self, prompt: Any, **fields: Any) -> Answer:
        """A completion."""
        return await self.ask("/v1/completions", {"prompt": prompt, **fields})


def answer_of(received: bytes) -> Answer:
    """An answer whose connection was closed after it."""
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        pieces, rest = [], body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            pieces.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        body = b"".join(pieces)
    return Answer(int(first.split(" ")[1]), headers, body)


@asynccontextmanager
async def serving_door(
    *schedulers: str,
    bounds: Bounds | None = None,
    failover_timeout_s: float = FAILOVER_TIMEOUT_S,
    security: Security | None = None,
    **options: Any,
) -> AsyncIterator[Door]:
    """A door before these schedulers. `security`: of its connections to them."""
    bounds = bounds or Bounds()
    async with Client(
        schedulers, security=security, failover_timeout_s=failover_timeout_s, extra_streams=EXTRA_STREAMS
    ) as client:
        app = Gateway(client, bounds, **options)
        server = Server(app, bounds)
        port = await server.listen("127.0.0.1", 0)
        force = asyncio.Event()
        force.set()
        try:
            yield Door(app, port)
        finally:
            await server.stop(force)
