"""Console output that never blocks or fails, even if its reader has left or does not read."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import IO, cast

from rich.console import Console

from paceline.cli.json_lines import JsonLines

MAX_QUEUED = 2_000
"""Maximum number of queued writes; above it the oldest is dropped."""

_FLUSH_S = 1.0


class LogWriter(io.TextIOBase):
    """A text stream that writes to a file descriptor in a thread of its own.

    `write` never blocks and never raises. Output that the descriptor refuses (the reader left, the disk is
    full, the terminal was closed) is dropped; so are the oldest queued writes above MAX_QUEUED.
    """

    def __init__(self, descriptor: int, like: IO[str]) -> None:
        self._descriptor = descriptor
        self._terminal = like.isatty()
        self._encoding = getattr(like, "encoding", None) or "utf-8"
        self._queued: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._writing = self._closing = False
        self._thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the written bytes."""
        return self._encoding

    def isatty(self) -> bool:
        """Whether the stream that this one replaces is a terminal."""
        return self._terminal

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str) -> int:
        """Queue the text; returns its length."""
        with self._changed:
            if len(self._queued) == MAX_QUEUED:
                self._queued.popleft()
                self._dropped += 1
            self._queued.append(text.encode(self._encoding, errors="replace"))
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes without buffering."""

    @property
    def idle(self) -> bool:
        """Whether all output is written or dropped."""
        return not self._queued and not self._writing

    def finish(self, timeout_s: float = _FLUSH_S) -> None:
        """Wait until all output is written or dropped, but at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.idle, timeout_s)

    def close(self) -> None:
        """Let the thread end when the queue is empty. The descriptor stays open."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queued or self._closing)
                if not self._queued:
                    return
                piece, dropped = self._queued.popleft(), self._dropped
                self._dropped = 0
                self._writing = True
            if dropped:
                self._put(f"[{dropped} pieces of output were dropped: nobody read them]\n".encode())
            self._put(piece)

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # no reader, or no space: drop the data
            while data:
                data = data[os.write(self._descriptor, data) :]


@contextlib.contextmanager
def never_blocking(console: Console) -> Iterator[None]:
    """A context manager: within the block, the console writes through a LogWriter."""
    shown, before = console.file, console._file  # None means the sys.stderr of the moment
    try:
        descriptor = os.dup(shown.fileno())  # stays open if stderr is closed
    except (OSError, ValueError, AttributeError):  # stderr is closed already, or is not a file
        yield
        return
    writer = LogWriter(descriptor, shown)
    stream = cast(IO[str], writer)
    console.file = cast(IO[str], JsonLines(stream)) if isinstance(shown, JsonLines) else stream
    try:
        yield
    finally:
        console._file = before
        writer.finish()
        writer.close()
