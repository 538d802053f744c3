"""What a user types into `paceline chat`: lines with editing keys, a history and completion.

By Python's own readline, which costs no package: arrows, Ctrl-R and Tab work as in a shell.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SEVERAL = '"""'
_KEPT_LINES = 1000


@contextmanager
def editing(commands: Iterable[str]) -> Iterator[None]:
    """Within, a terminal's lines can be edited, and `commands` completed. The history is the user's alone."""
    try:
        import readline
    except ImportError:  # a Python without it
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    words = sorted(commands)
    readline.set_completer_delims(" ")
    readline.set_completer(
        lambda text, state: [*(word + " " for word in words if word.startswith(text)), None][state]
    )
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(_KEPT_LINES)
    file = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "paceline" / "chat"
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(0o600)
        readline.read_history_file(file)
    try:
        yield
    finally:
        with suppress(OSError):
            readline.write_history_file(file)


def ask() -> str | None:
    """The user's next line, or what is between two lines that begin with three quotes; None at the end.

    Ctrl-C gives up the line: "". It stops an answer, too, which may just have ended.
    """
    lines: list[str] = []
    try:
        line = input("> " if sys.stdin.isatty() else "")
        if not line.startswith(_SEVERAL):
            return line
        lines = [line.removeprefix(_SEVERAL)]
        while not lines[-1].rstrip().endswith(_SEVERAL):
            lines.append(input(". " if sys.stdin.isatty() else ""))
        lines[-1] = lines[-1].rstrip().removesuffix(_SEVERAL)
        return "\n".join(lines).strip("\n")
    except KeyboardInterrupt:
        print("\nCtrl-D or /quit leaves")
        return ""
    except EOFError:
        return "\n".join(lines).strip("\n") if lines else None  # an input that ends within a question
