"""Walks through a compiled grammar: tokens drawn from its masks, by chance or with the end in view."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer

from executor_service.contract.grammar import Grammar, GrammarStuck
from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.automaton import Automaton

_CLOSING = '"}]>)0;.'
"""Characters that often bring a text to its end, the most promising first."""


class Walker:
    """Knows a tokenizer whose tokens are texts; the model has no say in where it goes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, frozenset(ends)
        self._closing = self._ids(_CLOSING)

    def text(self, tokens: list[int]) -> str:
        """Of some output, without what ends it."""
        return str(
            self._tokenizer.decode([t for t in tokens if t not in self._ends], skip_special_tokens=False)
        )

    def tokens(self, text: str) -> list[int]:
        """As the tokenizer has a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _ids(self, characters: Iterable[str]) -> list[int]:
        """The tokens that are one of these texts each."""
        encoded = [self.tokens(one) for one in characters]
        return [ids[0] for ids in encoded if len(ids) == 1 and ids[0] < self._vocab_size]

    def walk(
        self,
        grammar: Grammar,
        rng: random.Random,
        output: list[int],
        *,
        closing_after: int,
        max_tokens: int,
        hints: Iterable[str] = (),
    ) -> tuple[list[int], bool]:
        """Go on from an output, so many tokens at random, then towards the end; whether it got there.

        `hints`: texts of one token that may lead there, beside those that often do.
        Raises AssertionError if the grammar does not allow the output, GrammarStuck as the engine does.
        """
        automaton, output = Automaton(grammar), list(output)
        assert automaton.follow(np.array(output, np.int32)) == len(output), (
            "the output is none of the grammar"
        )
        hinting = self._ids(hints)
        while len(output) < max_tokens:
            allowed = allowed_tokens(automaton.mask(), self._vocab_size)
            ending = [token for token in self._ends if allowed[token]]
            closing = len(output) >= closing_after
            if ending and (closing or rng.random() < 0.05):
                return [*output, ending[0]], True
            token = None
            hinted = [each for each in hinting if closing and allowed[each]]
            if hinted and rng.random() < 0.7:
                token = rng.choice(hinted)
            elif closing and rng.random() < 0.9:
                token = next((token for token in self._closing if allowed[token]), None)
            if token is None:
                token = int(rng.choice(np.flatnonzero(allowed)))
                if token in self._ends:
                    return [*output, token], True
            output.append(token)
            assert automaton.follow(np.array(output, np.int32)) == len(output), (
                "a mask allows what is refused"
            )
        return output, False


__all__ = ["GrammarStuck", "Walker"]
