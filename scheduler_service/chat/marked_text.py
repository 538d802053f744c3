"""`MarkedTextParser`: what parsers of text between markers have in common; `MarkerFinder` finds these."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from scheduler_service.chat.events import Event


class MarkedTextParser(ABC):
    """Implements `CallParser.push` by what a subclass does with markers and with the text between them."""

    def __init__(self, markers: Sequence[str], *, by_id: bool) -> None:
        """`by_id`: markers come by `marker`, not in the text."""
        self._finder = None if by_id else MarkerFinder(markers)

    def push(self, text: str) -> Iterator[Event]:
        """As `CallParser.push`."""
        if self._finder is None:
            yield from self._text(text)
            return
        for part, is_marker in self._finder.push(text):
            yield from self.marker(part) if is_marker else self._text(part)

    @abstractmethod
    def marker(self, marker: str) -> Iterator[Event]:
        """As `CallParser.marker`; also one that was found in the text."""

    @abstractmethod
    def _text(self, text: str) -> Iterator[Event]:
        """Take text without markers."""

    def _flush_markers(self) -> Iterator[Event]:
        """Take what could have been the beginning of a marker, when no more text follows."""
        if self._finder is not None:
            yield from self._text(self._finder.flush())


class MarkerFinder:
    """Splits text at markers; what could be the beginning of one is held back."""

    def __init__(self, markers: Sequence[str]) -> None:
        """None of them may begin with another, or contain its own first character again."""
        self._pattern = re.compile(f"({'|'.join(map(re.escape, markers))})")
        self._heads = {marker[:size] for marker in markers for size in range(1, len(marker))}
        self._longest = max(map(len, markers)) - 1
        self._held = ""

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """Take more text; yields pieces of it, not empty, and whether they are markers."""
        parts = self._pattern.split(self._held + text)  # markers are at odd indices
        last = parts[-1]
        sizes = range(min(self._longest, len(last)), 0, -1)
        held = next((size for size in sizes if last[-size:] in self._heads), 0)
        self._held = last[len(last) - held :]
        parts[-1] = last[: len(last) - held]
        return ((part, bool(at % 2)) for at, part in enumerate(parts) if part)

    def flush(self) -> str:
        """The text that was held back, when no more text follows."""
        held, self._held = self._held, ""
        return held
