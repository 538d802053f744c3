"""Quantiles of the lengths of recent completions, which predict when a request ends."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque

LENGTH_QUANTILE = 0.8
"""For requests that are not started: while requests compete, one that ends by its deadline with a lower
probability than this is refused or given up."""
MEDIAN = 0.5
"""The quantile for running sequences."""
MIN_COMPLETIONS = 8
"""Completions that must have been seen before a length is predicted."""


class Lengths:
    """Output tokens of the last `size` completions."""

    __slots__ = ("_recent", "_size", "_sorted", "_sum")

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sum = 0

    @property
    def suffice(self) -> bool:
        """At least MIN_COMPLETIONS were seen."""
        return len(self._sorted) >= MIN_COMPLETIONS

    @property
    def mean(self) -> float | None:
        """None if no completion was seen."""
        return self._sum / len(self._recent) if self._recent else None

    def __len__(self) -> int:
        return len(self._sorted)

    def observe(self, tokens: int) -> None:
        """Add a completion that ended with `tokens` output tokens."""
        if len(self._recent) == self._size:
            oldest = self._recent.popleft()
            self._sum -= oldest
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._recent.append(tokens)
        self._sum += tokens
        insort(self._sorted, tokens)

    def quantile(self, share: float, beyond: int = 0) -> int | None:
        """The quantile of the lengths above `beyond`; None if there are none."""
        first = bisect_right(self._sorted, beyond)
        count = len(self._sorted) - first
        return self._sorted[first + int(count * share)] if count else None
