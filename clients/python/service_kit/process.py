"""A service process's event loop, signals, Unix socket and port file."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path

import grpc.aio

from service_kit.parent import call_at_end_of_stdin


class Shutdown:
    """Events that signals set: the first SIGTERM or SIGINT sets `drain`, the second sets `force`.

    SIGHUP sets `drain` alone: when a terminal is closed, both the shell and the kernel may send it.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.force = asyncio.Event()
        self.signal = 0  # number of the last SIGTERM or SIGINT; 0: none yet

    def listen(self) -> None:
        """Install the signal handlers in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            loop.add_signal_handler(signal.SIGHUP, self.drain.set)

    def listen_to_parent(self) -> None:
        """Set `drain` at the end of standard input too: the parent process has ended."""
        call_at_end_of_stdin(self.drain.set)

    def _received(self, number: int) -> None:
        (self.force if self.signal else self.drain).set()
        self.signal = number


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's event loop if uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def limit_collections(young_objects: int) -> None:
    """Run the garbage collector only after `young_objects` new objects, and never over those that exist now.

    Collecting stops the process: for 0.1 s with a thousand requests queued and Python's defaults (700
    objects, modules included). The services make few cycles, so little memory waits for a collection.
    """
    gc.set_threshold(young_objects)
    gc.collect()
    gc.freeze()


def bind_local(server: grpc.aio.Server, path: Path) -> None:
    """Listen on a Unix socket too, without TLS; only this process's user may open it. Raises RuntimeError.

    The parent process checks the service's health through it. Calls need the same tokens as on the port.
    """
    server.add_insecure_port(f"unix:{path.absolute()}")
    path.chmod(0o600)


def write_port_file(path: Path, port: int) -> None:
    """Write the port that the service listens on, for the parent process. The write is atomic."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(f"{port}\n")
    draft.replace(path)
