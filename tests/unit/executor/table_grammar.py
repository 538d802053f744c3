"""A grammar that is a table: what follows is read off it, and misuse is an AssertionError."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from executor_service.contract.grammar import GrammarStuck
from executor_service.contract.masks import mask_bytes

END = 256
VOCABULARY = 257


class TableGrammar:
    """`table[state]`: token to state, from state 0; the output may end in states of `ends`, by `end`."""

    def __init__(
        self,
        table: Mapping[int, Mapping[int, int]],
        ends: set[int],
        *,
        end: int = END,
        vocabulary: int = VOCABULARY,
    ) -> None:
        self.table, self.ends, self.end, self.vocabulary = table, ends, end, vocabulary
        self.warnings: tuple[str, ...] = ()
        self.matchers = 0  # how many were made
        self.consumed = 0  # tokens
        self.masks = 0  # how many were computed
        self.stuck_after = -1  # a matcher that did so much work (tokens, masks) is stuck; -1: never

    def matcher(self, *, alone: bool = False) -> TableMatcher:
        self.matchers += 1
        return TableMatcher(self)

    def allowed(self, output: list[int]) -> set[int]:
        """What may follow an output; the definition."""
        state: int | None = 0
        for token in output:
            if state is None or token not in self._next(state):
                raise ValueError(f"{output} is none of this grammar")
            state = self._next(state)[token]
        return set() if state is None else set(self._next(state))

    def _next(self, state: int) -> dict[int, int]:
        """Token to state; -1 is behind the end."""
        if state == -1:
            return {self.end: -1}
        return {**self.table.get(state, {}), **({self.end: -1} if state in self.ends else {})}


class TableMatcher:
    """Implements `Matcher`."""

    def __init__(self, grammar: TableGrammar) -> None:
        self._grammar, self._states, self._work, self._broken = grammar, [0], 0, False

    def consume(self, tokens: NDArray[np.int32]) -> int:
        for count, token in enumerate(tokens.tolist()):
            self._grammar.consumed += 1
            self._pay()
            following = self._grammar._next(self._states[-1])
            if token not in following:
                return count
            self._states.append(following[token])
        return len(tokens)

    def rollback(self, count: int) -> None:
        assert 0 < count < len(self._states)
        assert not self._broken
        del self._states[-count:]

    def mask(self) -> NDArray[np.uint8]:
        self._pay()
        self._grammar.masks += 1
        bits = np.zeros(8 * mask_bytes(self._grammar.vocabulary), np.uint8)
        following = list(self._grammar._next(self._states[-1]))
        if not following:
            self._broken = True
            raise GrammarStuck("the grammar allows no token here")
        bits[following] = 1
        return np.packbits(bits, bitorder="little")

    def forced(self) -> list[int]:
        self._pay()
        tokens: list[int] = []
        state = self._states[-1]
        while len(following := self._grammar._next(state)) == 1 and state != -1 and len(tokens) < 100:
            ((token, state),) = following.items()
            tokens.append(token)
        return tokens

    def _pay(self) -> None:
        assert not self._broken, "it was stuck before"
        self._work += 1
        if self._work == self._grammar.stuck_after:
            self._broken = True
            raise GrammarStuck("too much work")


def loops(end: int = END, vocabulary: int = VOCABULARY) -> TableGrammar:
    """Words over six tokens, with forced stretches, choices, ends and a way back."""
    return TableGrammar(
        {
            0: {10: 1, 11: 2},
            1: {12: 3},
            2: {10: 2, 11: 0, 13: 3, 14: 5},
            3: {14: 4},
            4: {15: 0, 10: 1, 12: 2},
            5: {11: 3, 12: 2},
        },
        ends={0, 4},
        end=end,
        vocabulary=vocabulary,
    )


def late(end: int = END, vocabulary: int = VOCABULARY) -> TableGrammar:
    """60 tokens with a choice each; then everything is forced."""
    free = {i: dict.fromkeys(((i * i) % 37 + 1, (7 * i) % 31 + 5, 40 + i % 7), i + 1) for i in range(60)}
    return TableGrammar(
        free | {i: {10 + i % 11: i + 1} for i in range(60, 200)}, ends={200}, end=end, vocabulary=vocabulary
    )


def turns(end: int = END, vocabulary: int = VOCABULARY) -> TableGrammar:
    """A choice of two, which forces one token or six, again and again."""
    forced = {i: {11 + i: i + 1 if i < 6 else 0} for i in range(1, 7)}
    return TableGrammar({0: {10: 1, 11: 7}, **forced, 7: {20: 0}}, ends=set(), end=end, vocabulary=vocabulary)
