"""A model's answer on the terminal: its text on stdout, what it wrote before it dimmed on stderr."""

from __future__ import annotations

import sys
import threading
from typing import Self

from paceline.chat import ToolCall
from paceline.cli.common import stderr
from paceline.cli.safe_text import written
from paceline.types import Completion, Delta

_SILENT_S = 4.0


def write(text: str) -> None:
    """Write to stdout and flush; see `written`."""
    sys.stdout.write(written(text))
    sys.stdout.flush()


class StreamedAnswer:
    """Writes the text of one completion to stdout as it arrives; a context manager.

    Its reasoning goes to stderr, if that is a terminal: a pipe or a file gets the answer alone. An answer
    that an error breaks off ends its line on a terminal: the error has one of its own. A terminal where
    nothing has come for some seconds is shown how to find out why; `request_id`: by what.
    """

    def __init__(self, request_id: str) -> None:
        self._reasons = False  # whether the cursor is after reasoning
        self._in_line = False  # whether it is after text that does not end a line
        note = f"no token yet: `paceline why {request_id}` says what it waits for"
        self._silence = threading.Timer(
            _SILENT_S, stderr.print, [note], {"style": "dim", "highlight": False, "soft_wrap": True}
        )
        self._silence.daemon = True

    def __enter__(self) -> Self:
        if stderr.is_terminal:
            self._silence.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.came()
        self._end_reasoning()
        if kind is not None and self._in_line and sys.stdout.isatty():
            write("\n")

    def came(self) -> None:
        """Something has come, which may not be shown yet."""
        self._silence.cancel()

    def add(self, delta: Delta) -> None:
        """Write what a delta adds, but for its tool calls: see `end`."""
        self.came()
        if delta.reasoning:
            write_reasoning(delta.reasoning)
            self._reasons = True
        if delta.text:
            self._end_reasoning()
            write(delta.text)
            self._in_line = not delta.text.endswith("\n")

    def end(self, completion: Completion) -> None:
        """End the line, and write the completion's tool calls, one a line."""
        self._end_reasoning()
        if completion.text or not completion.tool_calls:
            write("\n")
        self._in_line = False
        write(calls(completion.tool_calls))

    def _end_reasoning(self) -> None:
        if self._reasons:
            write_reasoning("\n\n")
            self._reasons = False


def write_reasoning(text: str) -> None:
    """Write dimmed to stderr, if it is a terminal."""
    if stderr.is_terminal:
        stderr.out(text, style="dim", end="", highlight=False)


def calls(tool_calls: tuple[ToolCall, ...]) -> str:
    """Tool calls as lines: name and arguments."""
    return "".join(f"{call.name} {call.arguments}\n" for call in tool_calls)
