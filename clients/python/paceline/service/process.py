"""A service as a process: its event loop, its signals, its port file."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc.aio

from paceline.service.parent import call_at_end_of_stdin


class Shutdown:
    """What the signals ask for: the first SIGTERM or SIGINT drains, the second forces.

    SIGHUP, the end of the terminal, drains and never forces: shells and the kernel may both send it.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.force = asyncio.Event()
        self.signal = 0  # the last one; 0: none yet

    def listen(self) -> None:
        """From now on signals end up here. Call it in the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            loop.add_signal_handler(signal.SIGHUP, self.drain.set)

    def listen_to_parent(self) -> None:
        """From now on the end of standard input drains too: whoever started us is gone."""
        call_at_end_of_stdin(self.drain.set)

    def _received(self, number: int) -> None:
        (self.force if self.signal else self.drain).set()
        self.signal = number


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it can be installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def bind_local(server: grpc.aio.Server, path: Path) -> None:
    """Listen on a Unix socket too, which only this process's user may open. Raises RuntimeError.

    Whoever started the service sees through it whether it answers, whatever TLS the port asks for.
    Tokens are asked for here as well.
    """
    server.add_insecure_port(f"unix:{path.absolute()}")
    path.chmod(0o600)


def write_port_file(path: Path, port: int) -> None:
    """Tell who started us which port we got; the file appears whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(f"{port}\n")
    draft.replace(path)
