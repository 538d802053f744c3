"""Between a scheduler and a real executor: passes everything on, and changes replies as a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from paceline.channel import Link, open_aio_channel, server_options

from tests.support.untyped import raw

Meddle = Callable[[str, bytes], list[bytes]]
"""The RPC's name and a reply's bytes to what is passed on in its place (of a unary RPC the first alone)."""


def honest(rpc: str, reply: bytes) -> list[bytes]:
    """The reply as it is."""
    return [reply]


class Meddler(grpc.GenericRpcHandler):
    """One executor's door. `meddle` may be changed at any time."""

    def __init__(self, executor: grpc.aio.Channel) -> None:
        self.meddle: Meddle = honest
        self.address = ""
        self._executor = raw(executor)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method: str = handler_call_details.method
        rpc = method.rpartition("/")[2]

        async def unary(request: bytes, context: Any) -> bytes:
            try:
                reply: bytes = await self._executor.unary_unary(method)(request, timeout=30)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
                raise
            return self.meddle(rpc, reply)[0]

        async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for reply in self._executor.stream_stream(method)(requests):
                for passed_on in self.meddle(rpc, reply):
                    yield passed_on

        async def pieces(request: bytes, context: Any) -> AsyncIterator[bytes]:
            async for reply in self._executor.unary_stream(method)(request):
                for passed_on in self.meddle(rpc, reply):
                    yield passed_on

        if rpc == "StreamUnifiedDecode":
            return grpc.stream_stream_rpc_method_handler(stream)
        if rpc == "GetTokenizer":
            return grpc.unary_stream_rpc_method_handler(pieces)
        return grpc.unary_unary_rpc_method_handler(unary)


@asynccontextmanager
async def meddling(executor: str) -> AsyncIterator[Meddler]:
    """A door in front of the executor at this address."""
    async with open_aio_channel(executor, Link.PRIVATE) as channel:
        server, meddler = grpc.aio.server(options=server_options(Link.PRIVATE)), Meddler(channel)
        server.add_generic_rpc_handlers((meddler,))
        meddler.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield meddler
        finally:
            await server.stop(None)
