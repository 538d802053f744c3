"""A service as a process: its event loop, its signals, its port file."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop


class Shutdown:
    """What the signals ask for: the first SIGTERM or SIGINT drains, the second forces."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.force = asyncio.Event()

    def listen(self) -> None:
        """From now on signals end up here. Call it in the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request)

    def request(self) -> None:
        """As one signal does."""
        (self.force if self.drain.is_set() else self.drain).set()


def run(main: Callable[[Shutdown], Awaitable[int]]) -> int:
    """Run `main` on uvloop and return its exit status."""

    async def started() -> int:
        shutdown = Shutdown()
        shutdown.listen()
        return await main(shutdown)

    return uvloop.run(started())


def write_port_file(path: Path, port: int) -> None:
    """Tell who started us which port we got; the file appears whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(f"{port}\n")
    draft.replace(path)
