"""Walks through a compiled grammar: tokens drawn from its masks, by chance or with the end in view."""

from __future__ import annotations

import random

import numpy as np
from tokenizers import Tokenizer

from executor_service.contract.grammar import Grammar, GrammarStuck
from executor_service.contract.masks import allowed_tokens
from executor_service.grammar.automaton import Automaton

_CLOSING = b'"}]>)0;.'
"""Bytes that often bring a text to its end, the most promising first."""


class Walker:
    """Knows a tokenizer whose tokens are texts; the model has no say in where it goes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, frozenset(ends)
        self._closing = [
            token
            for byte in _CLOSING
            if (token := tokenizer.token_to_id(chr(byte))) is not None and token < vocab_size
        ]

    def text(self, tokens: list[int]) -> str:
        """Of some output, without what ends it."""
        return str(
            self._tokenizer.decode([t for t in tokens if t not in self._ends], skip_special_tokens=False)
        )

    def walk(
        self, grammar: Grammar, rng: random.Random, output: list[int], *, closing_after: int, max_tokens: int
    ) -> tuple[list[int], bool]:
        """Go on from an output, so many tokens at random, then towards the end; whether it got there.

        Raises AssertionError if the grammar does not allow the output, GrammarStuck as the engine does.
        """
        automaton, output = Automaton(grammar), list(output)
        assert automaton.follow(np.array(output, np.int32)) == len(output), (
            "the output is none of the grammar"
        )
        while len(output) < max_tokens:
            allowed = allowed_tokens(automaton.mask(), self._vocab_size)
            ending = [token for token in self._ends if allowed[token]]
            closing = len(output) >= closing_after
            if ending and (closing or rng.random() < 0.05):
                return [*output, ending[0]], True
            token = None
            if closing and rng.random() < 0.9:
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
