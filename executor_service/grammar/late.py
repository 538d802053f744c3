"""`LateGrammar`: a grammar of the output after the first token of some id; before it, of nothing."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from executor_service.contract.grammar import Grammar, Matcher
from executor_service.contract.masks import Masks, mask_bytes


class LateGrammar:
    """Implements `Grammar`. Before it begins, all tokens are allowed but those that end a sequence."""

    def __init__(
        self, grammar: Grammar, begins_after: int, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """`grammar` is that of the output after the token `begins_after`, which ends no sequence."""
        self.grammar, self.begins_after = grammar, begins_after
        self.warnings = grammar.warnings
        self.ends = np.array(sorted(eos_token_ids), np.int32)
        bits = np.zeros(8 * mask_bytes(vocab_size), np.uint8)
        bits[:vocab_size] = 1
        bits[self.ends] = 0
        self.free_mask: Masks = np.packbits(bits, bitorder="little")
        """The mask of every position up to that token's."""

    def matcher(self, *, alone: bool = False) -> LateMatcher:
        """As `Grammar.matcher`."""
        return LateMatcher(self, alone=alone)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same grammar, compiled once, after the same token."""
        if not isinstance(other, LateGrammar):
            return NotImplemented
        return self.grammar is other.grammar and self.begins_after == other.begins_after

    def __hash__(self) -> int:
        return hash((self.grammar, self.begins_after))


class LateMatcher:
    """Implements `Matcher`: counts the tokens before the grammar's, and has a matcher of it from there on."""

    __slots__ = ("_alone", "_behind", "_free", "_late", "_matcher")

    def __init__(self, late: LateGrammar, *, alone: bool) -> None:
        self._late, self._alone = late, alone
        self._free = 0  # tokens consumed up to the first `begins_after`, with it
        self._matcher: Matcher | None = None  # of the tokens after it; None: it has not come
        self._behind = 0  # tokens that the matcher has consumed

    def consume(self, tokens: NDArray[np.int32]) -> int:
        """As `Matcher.consume`."""
        taken = 0
        if self._matcher is None:
            taken = self._consume_freely(tokens)
            self._free += taken
        if self._matcher is None or taken == len(tokens):
            return taken
        consumed = self._matcher.consume(tokens[taken:])
        self._behind += consumed
        return taken + consumed

    def rollback(self, count: int) -> None:
        """As `Matcher.rollback`."""
        if self._matcher is not None and count <= self._behind:
            self._matcher.rollback(count)
            self._behind -= count
            return
        self._free -= count - self._behind
        self._matcher, self._behind = None, 0

    def mask(self) -> Masks:
        """As `Matcher.mask`."""
        return self._late.free_mask if self._matcher is None else self._matcher.mask()

    def forced(self) -> list[int]:
        """As `Matcher.forced`."""
        return [] if self._matcher is None else self._matcher.forced()

    def _consume_freely(self, tokens: NDArray[np.int32]) -> int:
        """How many of `tokens` come up to the first `begins_after`, or before one that ends a sequence."""
        late = self._late
        stops = np.flatnonzero((tokens == late.begins_after) | np.isin(tokens, late.ends))
        if not len(stops):
            return len(tokens)
        first = int(stops[0])
        if tokens[first] != late.begins_after:
            return first
        self._matcher = late.grammar.matcher(alone=self._alone)
        return first + 1
