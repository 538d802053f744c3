"""The output of `serve` as JSON lines: its own words, and those of its services."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any, cast

from rich.console import Console

_FAILED = "paceline: "  # what `fail` puts in front of a message


class JsonLines(io.TextIOBase):
    """A text stream that writes each line as an object with time, level, logger and message.

    Services' lines go through `pass_on`, and get the service's name; objects keep their fields.
    """

    def __init__(self, sink: IO[str]) -> None:
        self._sink = sink
        self._begun = ""  # text after the last line break

    def isatty(self) -> bool:
        """False: no colors, no progress bars."""
        return False

    def fileno(self) -> int:
        """That of the stream that it writes to."""
        return self._sink.fileno()

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str) -> int:
        """Write the lines that `text` completes; returns its length."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self._put(_own(line))
        return len(text)

    def pass_on(self, service: str, line: str) -> None:
        """Write a line of a service's output, or about it."""
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        fields = said if isinstance(said, dict) else _own(line)
        self._put({**fields, "service": service})

    def flush(self) -> None:
        """Flush the stream that it writes to."""
        self._sink.flush()

    def _put(self, fields: dict[str, Any]) -> None:
        self._sink.write(json.dumps(fields) + "\n")


def _own(message: str) -> dict[str, Any]:
    time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    level = "error" if message.startswith(_FAILED) else "info"
    return {"time": time, "level": level, "logger": "paceline.serve", "message": message.strip()}


@contextmanager
def json_lines(console: Console) -> Iterator[None]:
    """A context manager: within the block, what the console prints is JSON lines."""
    before = console._file  # None means the sys.stderr of the moment
    console.file = cast(IO[str], JsonLines(console.file))
    try:
        yield
    finally:
        console._file = before
