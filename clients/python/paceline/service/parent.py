"""A service that must not outlive the process that started it, for both services."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

STDIN = 0


def call_at_end_of_stdin(callback: Callable[[], None]) -> None:
    """Call back once, in the running event loop, when standard input ends.

    A parent that keeps the other end of a pipe open says by its death, of whatever kind and on any
    platform, that nobody looks after its children any more. Standard input must be a pipe or a socket.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            given = os.read(STDIN, 4096)
        except OSError:  # a terminal that is gone
            given = b""
        if not given:
            loop.remove_reader(STDIN)
            callback()

    loop.add_reader(STDIN, read)
