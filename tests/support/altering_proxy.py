"""A gRPC proxy between a scheduler and an executor that watches steps and alters the executor's replies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from paceline.channel import Link, open_aio_channel, server_options

from tests.support.untyped import raw

Alteration = Callable[[str, bytes], list[bytes]]
"""From an RPC's name and a reply's bytes to the replies to pass on instead; a unary RPC gets the first."""

Watch = Callable[[bytes], None]
"""Called with each StreamUnifiedDecodeRequest before it is passed on."""


def unaltered(rpc: str, reply: bytes) -> list[bytes]:
    """The reply as it is."""
    return [reply]


class AlteringProxy(grpc.GenericRpcHandler):
    """The proxy of one executor. `alteration` and `watch` may be changed at any time."""

    def __init__(self, executor: grpc.aio.Channel) -> None:
        self.alteration: Alteration = unaltered
        self.watch: Watch = lambda request: None
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
            return self.alteration(rpc, reply)[0]

        async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for reply in self._executor.stream_stream(method)(watched(requests)):
                for passed_on in self.alteration(rpc, reply):
                    yield passed_on

        async def watched(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for request in requests:
                self.watch(request)
                yield request

        async def pieces(request: bytes, context: Any) -> AsyncIterator[bytes]:
            async for reply in self._executor.unary_stream(method)(request):
                for passed_on in self.alteration(rpc, reply):
                    yield passed_on

        if rpc == "StreamUnifiedDecode":
            return grpc.stream_stream_rpc_method_handler(stream)
        if rpc == "GetTokenizer":
            return grpc.unary_stream_rpc_method_handler(pieces)
        return grpc.unary_unary_rpc_method_handler(unary)


@asynccontextmanager
async def altering_proxy(executor: str) -> AsyncIterator[AlteringProxy]:
    """A proxy, serving, of the executor at this address."""
    async with open_aio_channel(executor, Link.PRIVATE) as channel:
        server, proxy = grpc.aio.server(options=server_options(Link.PRIVATE)), AlteringProxy(channel)
        server.add_generic_rpc_handlers((proxy,))
        proxy.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield proxy
        finally:
            await server.stop(None)
