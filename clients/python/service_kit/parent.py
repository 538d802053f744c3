"""Detects the end of the parent process, so that a service does not outlive it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

STDIN = 0


def call_at_end_of_stdin(callback: Callable[[], None]) -> None:
    """Call `callback` once, in the running event loop, when standard input ends.

    Meant for a pipe or a socket whose other end the parent holds open: the operating system closes it when
    the parent ends, even if it is killed. A terminal works too. Raises PermissionError for a regular file.
    Input before the end is discarded.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            given = os.read(STDIN, 4096)
        except OSError:  # EIO: standard input was a terminal that is closed
            given = b""
        if not given:
            loop.remove_reader(STDIN)
            callback()

    loop.add_reader(STDIN, read)
