"""Test data from a seed: prompts that fit the executor's vocabulary and page size."""

from __future__ import annotations

import random

from tests.conformance.kit.client import Executor


class Draw:
    """Draws tokens for one test; the same test and seed draw the same."""

    def __init__(self, executor: Executor, seed: str) -> None:
        self._random = random.Random(seed)
        self._vocab = executor.vocab
        self._page = executor.page

    def tokens(self, count: int) -> list[int]:
        """`count` token ids."""
        return [self._random.randrange(self._vocab) for _ in range(count)]

    def prompt(self) -> list[int]:
        """A prompt of two full pages and a half or more: every boundary that matters lies inside."""
        return self.tokens(max(2 * self._page + self._page // 2 + 1, 21))

    def short(self) -> list[int]:
        """A prompt that leaves room in its only page (where a page has room for more than one token)."""
        return self.tokens(max(1, self._page // 2))

    def other(self, token: int) -> int:
        """Any token but this one."""
        return (token + self._random.randrange(1, self._vocab)) % self._vocab

    def seed(self) -> int:
        """A sampling seed: any uint64."""
        return self._random.getrandbits(64)

    def salt(self) -> bytes:
        """A prefix-cache namespace of its own."""
        return self._random.randbytes(16)
