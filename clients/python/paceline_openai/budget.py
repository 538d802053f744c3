"""A bound of the bytes of bodies in memory, of all callers together and of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from paceline_openai.refusals import Refusal

_RETRY_S = 1.0


class BodyBudget:
    """Bytes of bodies that may be in memory: `total` of all, half of it of one caller, `most` of one body."""

    def __init__(self, most: int, total: int) -> None:
        self._most, self._total = most, total
        self._held: Counter[bytes] = Counter()
        self._sum = 0

    @property
    def held_bytes(self) -> int:
        """The bytes that all bodies hold now."""
        return self._sum

    @contextmanager
    def holding(self, owner: bytes, expected: int) -> Iterator[Held]:
        """Room for a body until the block ends. `expected`: its Content-Length, or 0. Raises Refusal."""
        held = Held(self, owner)
        try:
            held.grow(expected)
            yield held
        finally:
            self._change(owner, -held.count)

    def take(self, owner: bytes, more: int, length: int) -> None:
        """Count `more` bytes of a body that has then `length`. Raises Refusal."""
        if length > self._most:
            text = f"the body has more than {self._most:,} bytes"
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, code="request_too_large", close=True)
        own = max(self._total // 2, self._most)
        if self._sum + more > self._total or self._held[owner] + more > own:
            text = "other requests' bodies take all memory that there is for them; try again"
            raise Refusal(
                HTTPStatus.TOO_MANY_REQUESTS,
                text,
                "rate_limit_error",
                "rate_limit_exceeded",
                None,
                _RETRY_S,
                close=True,
            )
        self._change(owner, more)

    def _change(self, owner: bytes, count: int) -> None:
        self._sum += count
        self._held[owner] += count
        if not self._held[owner]:
            del self._held[owner]


class Held:
    """What one body holds of a budget."""

    def __init__(self, budget: BodyBudget, owner: bytes) -> None:
        self._budget, self._owner = budget, owner
        self.count = 0

    def grow(self, length: int) -> None:
        """Hold room for `length` bytes in all. Raises Refusal."""
        if length > self.count:
            self._budget.take(self._owner, length - self.count, length)
            self.count = length
