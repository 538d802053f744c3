"""What a sequence's output must match, as the engine sees it.

Output tokens are those after `prompt_length`. What may come next is a pure function of grammar and output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class GrammarStuck(Exception):
    """The grammar allows no token here, or finding out takes more work than the limits allow.

    The matcher that raised it can't be used any more.
    """

    def __init__(self, why: str, *, by_others: bool = False) -> None:
        """`by_others`: what other matchers of the grammar have computed may be the reason."""
        super().__init__(why)
        self.by_others = by_others


class ReplayUnfinished(Exception):
    """To replay an output takes more time than a step may spend on it. What was done is kept."""

    def __init__(self) -> None:
        super().__init__("the grammar has not read all of the output yet; try again")


class Matcher(Protocol):
    """Where one output stands in a grammar. One thread at a time."""

    def consume(self, tokens: NDArray[np.int32]) -> int:
        """Go on with these tokens, up to the first that is not allowed; returns how many were consumed.

        Raises GrammarStuck.
        """

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens consumed."""

    def mask(self) -> NDArray[np.uint8]:
        """The mask of the next token, [bytes] as in `contract.masks`; it allows at least one.

        Where the output may end, that includes all ids that end a sequence. Raises GrammarStuck.
        """

    def forced(self) -> list[int]:
        """The next tokens as far as the grammar leaves no choice. Raises GrammarStuck."""


class Grammar(Protocol):
    """A compiled grammar; shared by sequences and threads."""

    @property
    def warnings(self) -> Sequence[str]:
        """For people: parts of it that have no effect."""

    def matcher(self, *, alone: bool = False) -> Matcher:
        """A matcher of the empty output; `alone`: one that shares its limits with no other, now or later.

        Raises GrammarStuck.
        """
