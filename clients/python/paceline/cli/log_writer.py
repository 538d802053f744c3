"""Output of a process that must go on whoever reads it: a reader that has left, or that stands still."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import IO, cast

from rich.console import Console

MAX_WAITING = 2_000
"""Pieces of output that wait for a reader who stands still; older ones are dropped."""

_FLUSH_S = 1.0


class LogWriter(io.TextIOBase):
    """Writes to a file descriptor in a thread of its own.

    `write` never blocks and never raises: what the descriptor refuses (a reader that left, a full disk,
    a terminal that is gone) is dropped, and so is the oldest of what waits when there is too much.
    """

    def __init__(self, descriptor: int, like: IO[str]) -> None:
        self._descriptor = descriptor
        self._terminal = like.isatty()
        self._encoding = getattr(like, "encoding", None) or "utf-8"
        self._waiting: deque[bytes] = deque()
        self._news = threading.Condition()
        self._dropped = 0
        self._writing = self._closing = False
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the text."""
        return self._encoding

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        return self._terminal

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Queue it."""
        with self._news:
            if len(self._waiting) == MAX_WAITING:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(text.encode(self._encoding, errors="replace"))
            self._news.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread writes as fast as it can."""

    @property
    def idle(self) -> bool:
        """Whether all is written or dropped."""
        return not self._waiting and not self._writing

    def finish(self, timeout_s: float = _FLUSH_S) -> None:
        """Wait until all is written, but not for long."""
        with self._news:
            self._news.wait_for(lambda: self.idle, timeout_s)

    def close(self) -> None:
        """End the thread once it can; the descriptor stays open."""
        with self._news:
            self._closing = True
            self._news.notify_all()

    def _run(self) -> None:
        while True:
            with self._news:
                self._writing = False
                self._news.notify_all()
                self._news.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                piece, dropped = self._waiting.popleft(), self._dropped
                self._dropped = 0
                self._writing = True
            if dropped:
                self._put(f"[{dropped} pieces of output were dropped: nobody read them]\n".encode())
            self._put(piece)

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody there, or no room: the line is lost, and we go on
            while data:
                data = data[os.write(self._descriptor, data) :]


@contextlib.contextmanager
def never_blocking(console: Console) -> Iterator[None]:
    """For the length of the block, the console's lines go through a LogWriter."""
    shown, before = console.file, console._file  # before: None, for whatever sys.stderr is at the time
    try:
        descriptor = os.dup(shown.fileno())  # who closes stderr does not close this
    except (OSError, ValueError, AttributeError):  # stderr was closed before we started, or is no file
        yield
        return
    writer = LogWriter(descriptor, shown)
    console.file = cast(IO[str], writer)
    try:
        yield
    finally:
        console._file = before
        writer.finish()
        writer.close()
