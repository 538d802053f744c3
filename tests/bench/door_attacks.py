"""What strangers, and callers with a key, may send to the OpenAI API to harm others."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.bench.door_fuzz import bodies

MIB = 1 << 20
_GIVE_UP_S = 6.0
_LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}


@dataclass
class Target:
    """The door. `key`: of a caller who is let in. `statuses`: of all answers."""

    port: int
    key: str
    statuses: Counter[int] = field(default_factory=Counter)

    def head(self, path: str, key: str | None = None, **headers: str) -> bytes:
        """A request's head, without its last empty line."""
        given = {
            "host": "localhost",
            "content-type": "application/json",
            "connection": "close",
            "authorization": f"Bearer {self.key if key is None else key}",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        return "\r\n".join(lines).encode() + b"\r\n"

    async def send(
        self, *pieces: bytes, every_s: float = 0.0, read: bool = True, hold_s: float = 0.0
    ) -> None:
        """Send on a connection of its own, read what comes if `read`, and leave."""
        writer = None
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_GIVE_UP_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    if every_s:
                        await asyncio.sleep(every_s)
                if hold_s:
                    await asyncio.sleep(hold_s)
                if read:
                    while line := await reader.readline():
                        self.count(line)
        if writer is not None:
            writer.transport.abort()

    def count(self, line: bytes) -> None:
        """Count a line that begins an answer."""
        if line.startswith(b"HTTP/1.1 "):
            self.statuses[int(line[9:12])] += 1


Attack = Callable[[Target, int], Coroutine[Any, Any, None]]
ATTACKS: dict[str, tuple[Attack, int, int]] = {}
"""By name: what is done, with how many in full, and in the short form."""


def attack(name: str, full: int, short: int) -> Callable[[Attack], Attack]:
    """One of the attacks, with so many clients or requests."""

    def add(function: Attack) -> Attack:
        ATTACKS[name] = (function, full, short)
        return function

    return add


@attack("clients that send 15 MB and leave", 8, 8)
async def leaving(target: Target, count: int) -> None:
    text = json.dumps({"prompt": "word " * (3 * MIB), "max_tokens": 1}).encode()
    fits = json.dumps({"prompt": "word " * (MIB * 3 // 2), "max_tokens": 1}).encode()
    for body in (text, fits):  # above the bound of a body, and below
        head = target.head("/v1/completions", content_length=str(len(body))) + b"\r\n"
        await asyncio.gather(*(target.send(head, body, read=False) for _ in range(count)))


@attack("strangers with large bodies", 200, 40)
async def strangers(target: Target, count: int) -> None:
    head = target.head("/v1/chat/completions", key="wrong", content_length=str(7 * MIB)) + b"\r\n"
    chunked = target.head("/v1/chat/completions", key="wrong", transfer_encoding="chunked") + b"\r\n"
    chunk = b"%x\r\n" % MIB + b"x" * MIB + b"\r\n"
    for _ in range(count // 20):
        given = [(head, b"x" * MIB), (chunked, chunk, chunk)] * 10
        await asyncio.gather(*(target.send(*pieces) for pieces in given))


@attack("slow heads, bodies and readers", 300, 60)
async def slow(target: Target, count: int) -> None:
    heads = [b"POST /v1/completions HTTP/1.1\r\n", *(b"x%d: 1\r\n" % number for number in range(8))]
    body = target.head("/v1/completions", content_length="100000") + b"\r\n"
    long = json.dumps(_LONG).encode()
    stream = target.head("/v1/completions", content_length=str(len(long))) + b"\r\n" + long
    each = count // 3
    await asyncio.gather(
        *(target.send(*heads, every_s=0.3, read=False) for _ in range(each)),
        *(target.send(body, *[b"{" + b" " * 100] * 8, every_s=0.3, read=False) for _ in range(each)),
        *(target.send(stream, read=False, hold_s=2.5) for _ in range(each // 4)),
    )


@attack("idle connections", 2000, 400)
async def idle(target: Target, count: int) -> None:
    for _ in range(0, count, 200):
        await asyncio.sleep(0.1)
        held = [asyncio.create_task(target.send(read=False, hold_s=count / 400)) for _ in range(200)]
    await asyncio.gather(*held)


@attack("chunked bombs", 40, 10)
async def chunked(target: Target, count: int) -> None:
    head = target.head("/v1/completions", transfer_encoding="chunked") + b"\r\n"
    large = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"
    trailers = b"0\r\n" + b"".join(b"x%d: %s\r\n" % (number, b"y" * 1000) for number in range(1000))
    for pieces in (
        (head, *[large] * 12),
        (head, b"1\r\n \r\n" * 300_000),
        (head, b"f" * 100_000),
        (head, b"1\r\n{\r\n", trailers),
    ):
        await asyncio.gather(*(target.send(*pieces) for _ in range(count // 4)))


@attack("floods of pipelined requests", 20, 6)
async def pipelined(target: Target, count: int) -> None:
    empty = target.head("/v1/completions", content_length="2", connection="keep-alive") + b"\r\n{}"
    long = json.dumps(_LONG).encode()
    kept = {"content_length": str(len(long)), "connection": "keep-alive"}
    stream = target.head("/v1/completions", **kept) + b"\r\n" + long
    for one in (empty, stream):
        await asyncio.gather(*(target.send(one * 2000, hold_s=1) for _ in range(count // 2)))


HOSTILE = {
    "100,000 deep": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects 100,000 deep": b'{"metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "a million keys": b'{"prompt":"x","logit_bias":{'
    + b",".join(b'"%d":1' % n for n in range(10**6))
    + b"}}",
    "half a million": b'{"prompt":"x","logit_bias":{'
    + b",".join(b'"%d":1' % n for n in range(520_000))
    + b"}}",
    "as many keys as may be": b'{"prompt":"x","logit_bias":{'
    + b",".join(b'"%d":1' % n for n in range(32_000))
    + b"}}",
    "as many values as may be": b'{"prompt":[' + b"1," * 520_000 + b'1],"max_tokens":1}',
    "wrong UTF-8": b'{"prompt":"\xff\xfe\xc3"}',
    "billions of completions": b'{"prompt":"x","n":4000000000,"max_tokens":1}',
    "half a surrogate": b'{"prompt":"\\ud800"}',
    "NaN": b'{"prompt":"x","temperature":NaN}',
    "a long number": b'{"prompt":"x","max_tokens":' + b"9" * MIB + b"}",
    "an exponent": b'{"prompt":"x","temperature":1e999999}',
}


@attack("deep, large and wrong JSON", 4, 1)
async def wrong_json(target: Target, count: int) -> None:
    for body in HOSTILE.values():
        head = target.head("/v1/completions", content_length=str(len(body))) + b"\r\n"
        await asyncio.gather(*(target.send(head, body, hold_s=0.1) for _ in range(count)))


@attack("malformed requests from the schema", 5000, 300)
async def malformed(target: Target, count: int) -> None:
    given = bodies(count, seed=1)

    async def worker() -> None:
        writer = None
        for path, body in given:
            head = target.head(path, content_length=str(len(body)), connection="keep-alive") + b"\r\n"
            while True:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
                try:
                    writer.write(head + body)
                    first = await _answer(reader)
                except (OSError, asyncio.IncompleteReadError):
                    writer = None  # it was closed after the answer before
                    continue
                target.count(first)
                break
        if writer is not None:
            writer.close()
            await writer.wait_closed()

    async with asyncio.timeout(600):
        await asyncio.gather(*(worker() for _ in range(8)))


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The first line of an answer, which is read to its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    else:
        length = lower.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
    return head
