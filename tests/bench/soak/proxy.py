"""A TCP proxy that is a bad network: it resets, stalls and swallows what goes through it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_RESET = struct.pack("ii", 1, 0)  # close without lingering: the peer gets a RST


class BadNetwork:
    """Connections of this machine to one port. Faults strike all that are open, and none that come later."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._open: set[_Connection] = set()

    @property
    def connections(self) -> int:
        """That are open."""
        return len(self._open)

    def reset(self) -> None:
        """End them with a RST to both sides."""
        for connection in tuple(self._open):
            connection.reset()

    def stall(self) -> None:
        """Pass nothing on from now on, in either direction: both sides see an open connection."""
        for connection in self._open:
            connection.passing.clear()

    def swallow(self) -> None:
        """Take everything and pass nothing on: not even the network's buffers fill up."""
        for connection in self._open:
            connection.swallows = True

    def go_on(self) -> None:
        """Pass on again what was stalled."""
        for connection in self._open:
            connection.passing.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        connection = _Connection()
        self._open.add(connection)
        connection.writers.append(writer)
        try:
            upstream, up = await asyncio.open_connection("127.0.0.1", self._target)
            connection.writers.append(up)
            passing = [
                asyncio.create_task(connection.pass_on(one, to))
                for one, to in ((reader, up), (upstream, writer))
            ]
            try:
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in passing:
                    task.cancel()
                await asyncio.gather(*passing, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(connection)
            for one in connection.writers:
                one.close()


class _Connection:
    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.passing = asyncio.Event()
        self.passing.set()
        self.swallows = False

    def reset(self) -> None:
        for writer in self.writers:
            with suppress(OSError, AttributeError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self.passing.wait()
                if not self.swallows:
                    writer.write(data)
                    await writer.drain()


@asynccontextmanager
async def bad_network(target: int) -> AsyncIterator[BadNetwork]:
    """In front of a port of this machine."""
    network = BadNetwork(target)
    server = await asyncio.start_server(network.serve, "127.0.0.1", 0)
    network.port = server.sockets[0].getsockname()[1]
    try:
        yield network
    finally:
        server.close()
        network.reset()
