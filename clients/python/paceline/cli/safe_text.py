"""Text of a model or a service on a terminal: its control characters are shown, and not obeyed.

A terminal takes some of them as orders: set the title or the clipboard, clear the screen, move the cursor.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0, C1 and DEL, but tab and line feed."""


def shown(text: str) -> str:
    """`text` with control characters other than tab and line feed as \\xNN."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def written(text: str) -> str:
    """`text` as stdout gets it: as it is, but on a terminal as `shown`."""
    return shown(text) if sys.stdout.isatty() else text


class SafeConsole(Console):
    """A console on which no text is obeyed. Its own styles and cursor movements are no text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of something that is printed, with text as `shown`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)
