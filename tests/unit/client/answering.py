"""A server that answers any call with given messages, and both clients to call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import paceline
import pytest
from google.protobuf.message import Message
from paceline import aio


class Script(grpc.GenericRpcHandler):
    """Answers any call with the same bytes, one message each, and then with OK."""

    def __init__(self, method: str, answers: list[bytes]) -> None:
        streaming = method in ("Generate", "StreamUnifiedDecode")

        async def unary(request: bytes, context: Any) -> bytes:
            return answers[0]

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            for answer in answers:
                yield answer

        self._handler: Any = grpc.unary_unary_rpc_method_handler(unary)
        if streaming:
            kind = grpc.unary_stream_rpc_method_handler
            kind = grpc.stream_stream_rpc_method_handler if method == "StreamUnifiedDecode" else kind
            self._handler = kind(stream)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handler


@asynccontextmanager
async def answering(method: str, *answers: Message | bytes) -> AsyncIterator[str]:
    server = grpc.aio.server()
    raw = [answer if isinstance(answer, bytes) else answer.SerializeToString() for answer in answers]
    server.add_generic_rpc_handlers((Script(method, raw),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def blocking(address: str, use: Callable[[Any], Any]) -> Any:
    def call() -> Any:
        with paceline.Client(address) as client:
            return use(client)

    return await asyncio.to_thread(call)


async def asynchronous(address: str, use: Callable[[Any], Any]) -> Any:
    async with aio.Client(address) as client:
        return await use(client)


Run = Callable[[str, Callable[[Any], Any]], Awaitable[Any]]
both = pytest.mark.parametrize("run", [blocking, asynchronous])
