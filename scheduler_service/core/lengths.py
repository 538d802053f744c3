"""How long completions are: a quantile of the last ones, which predicts when a request ends."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

LENGTH_QUANTILE = 0.8
"""Of completions, for those that are to be started: while requests compete, one whose chance to be done by
its deadline is less than this makes room for others."""
MEDIAN = 0.5
"""For those that run."""
MIN_COMPLETIONS = 8
"""Seen before anything is predicted."""


class Lengths:
    """Output tokens of the last `size` completions."""

    __slots__ = ("_recent", "_size", "_sorted")

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    @property
    def known(self) -> bool:
        """Enough was seen."""
        return len(self._sorted) >= MIN_COMPLETIONS

    def observe(self, tokens: int) -> None:
        """A completion ended with so many."""
        if len(self._recent) == self._size:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(tokens)
        insort(self._sorted, tokens)

    def quantile(self, share: float, beyond: int = 0) -> int | None:
        """The quantile of those longer than `beyond`; None if there are none."""
        first = bisect_right(self._sorted, beyond)
        count = len(self._sorted) - first
        return self._sorted[first + int(count * share)] if count else None
