"""More calls than a server can take at once: no call ends with a status that the server did not send.

gRPC cancels calls by itself when too many wait for the event loop; `server_options` says what is done
about it. Its effect is what these tests look at.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from paceline import aio, errors
from paceline.channel import MAX_CONNECTION_STREAMS, Link, open_aio_channel, server_options

from tests.support.stack import oracle_stack
from tests.support.untyped import raw

pytestmark = pytest.mark.long

METHOD = b"/test.Echo/Echo"


class Echo(grpc.GenericRpcHandler):
    """Answers the request's own bytes, and knows how many calls it had at once."""

    def __init__(self) -> None:
        self.most = self._now = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def echo(request: bytes, context: Any) -> bytes:
            self._now += 1
            self.most = max(self.most, self._now)
            await asyncio.sleep(0)
            self._now -= 1
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


@asynccontextmanager
async def echo_server(link: Link) -> AsyncIterator[tuple[Echo, int]]:
    server, echo = grpc.aio.server(options=server_options(link)), Echo()
    server.add_generic_rpc_handlers((echo,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield echo, port
    finally:
        await server.stop(None)


async def burst(channel: grpc.aio.Channel, calls: int) -> Counter[str]:
    """How calls of one connection end that are made at once, before the server gets a turn."""

    async def one() -> str:
        try:
            await raw(channel).unary_unary(METHOD.decode())(b"x", timeout=120)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"

    return Counter(await asyncio.gather(*(one() for _ in range(calls))))


async def test_a_burst_of_calls_reaches_its_handlers_whatever_its_size() -> None:
    async with echo_server(Link.PUBLIC) as (echo, port):
        async with open_aio_channel(f"127.0.0.1:{port}", Link.PUBLIC) as channel:
            assert await burst(channel, 1) == {"OK": 1}
            assert await burst(channel, 5_000) == {"OK": 5_000}
        assert echo.most <= MAX_CONNECTION_STREAMS


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def reset_rapidly(port: int, calls: int) -> socket.socket:
    """Open a connection, and on it so many calls that are reset in the same write (RFC 9113, 5.4.2)."""
    post_over_http = b"\x83\x86"  # of HPACK's static table
    call = post_over_http + b"".join(
        _literal(name, value)
        for name, value in (
            (b":path", METHOD),
            (b":authority", b"flood"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
    )
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"")
    cancel = struct.pack(">I", 8)
    frames = (_frame(1, 4, 2 * i + 1, call) + _frame(3, 0, 2 * i + 1, cancel) for i in range(calls))
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(preface + b"".join(frames))
    return connection


async def test_calls_that_one_connection_opens_and_resets_cancel_no_others() -> None:
    async with (
        echo_server(Link.PUBLIC) as (_, port),
        open_aio_channel(f"127.0.0.1:{port}", Link.PUBLIC) as channel,
    ):
        flood = asyncio.create_task(asyncio.to_thread(reset_rapidly, port, 50_000))
        ends = await burst(channel, 1)
        while not flood.done():
            ends += await burst(channel, 200)
        assert ends.keys() == {"OK"}
        flood.result().close()


async def test_a_burst_of_requests_is_answered_or_refused_with_a_retry_time(tmp_path: Path) -> None:
    with oracle_stack(tmp_path, scheduler=["--max-queued-requests", "300"]) as stack:
        async with stack.client() as client:

            async def one(client: aio.Client, seed: int) -> str:
                try:
                    await client.generate(token_ids=[1 + seed % 200], max_tokens=1, timeout_s=120).collect()
                except errors.QueueFull as error:
                    return "refused" if error.retry_after_s else "refused without a time"
                return "answered"

            ends = Counter(await asyncio.gather(*(one(client, seed) for seed in range(1_000))))
            assert ends["answered"] >= 300
            assert ends["answered"] + ends["refused"] == 1_000
