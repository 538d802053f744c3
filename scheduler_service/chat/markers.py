"""`MarkerFinder`: markers in text, for models whose vocabulary has no token for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence


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
