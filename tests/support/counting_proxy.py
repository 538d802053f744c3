"""A TCP proxy that counts: how much of what clients send does a server take?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class CountingProxy:
    """Bytes that came from clients and that the server's socket has taken."""

    def __init__(self, target: int) -> None:
        self.sent = 0
        self.port = 0
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            upstream, up = await asyncio.open_connection("127.0.0.1", self._target)
            with suppress(OSError):
                await asyncio.gather(self._pass(reader, up, count=True), self._pass(upstream, writer))
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def close(self) -> None:
        """End what is connected."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool = False
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
                self.sent += len(data) if count else 0
        finally:
            writer.close()


@asynccontextmanager
async def counting_proxy(target: int) -> AsyncIterator[CountingProxy]:
    """A proxy in front of a port of this machine."""
    proxy = CountingProxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
