"""Grammars of sequences: caught by test_grammar.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession
from executor_service.grammar.automaton import Automaton
from executor_service.grammar.late import LateGrammar, LateMatcher
from executor_service.steps import reservation
from tests.conformance.mutants.registry import mutant, wrap


@mutant()
def grammar_mask_one_position_late() -> None:
    """a token is drawn from what the grammar allowed before the one in front of it"""

    def mask(original: Any, self: Automaton) -> Any:
        earlier = Automaton(self.grammar)
        earlier.follow(self._output[: self._count - 1].copy())
        return original(earlier)

    wrap(Automaton, "mask", mask)


@mutant()
def grammar_not_rolled_back_after_a_rejected_draft() -> None:
    """the grammar's state keeps the drafts that were verified and not accepted"""

    def follow(original: Any, self: Automaton, output: Any) -> int:
        kept = self._output[: self._count]
        if 0 < len(output) - 1 < self._count and np.array_equal(output[:-1], kept[: len(output) - 1]):
            return len(output)
        taken: int = original(self, output)
        return taken

    wrap(Automaton, "follow", follow)


@mutant()
def grammar_lost_in_a_fork() -> None:
    """a fork samples anything"""

    def fork(original: Any, self: SequenceStore, session: ClientSession, op: Any, now_s: float) -> Any:
        return original(self, session, replace(op, sampling=replace(op.sampling, grammar=None)), now_s)

    wrap(SequenceStore, "_fork", fork)


@mutant()
def grammar_begins_anew_in_a_fork() -> None:
    """a fork's grammar has not seen the output that it was forked with"""
    wrap(Automaton, "why_not", lambda original, self, output: original(self, output[len(output) :]))


@mutant()
def grammar_replayed_from_the_prompt() -> None:
    """the state counts the last tokens of the prompt as output"""

    def constrain(original: Any, index: int, opening: Any, automaton: Any, *, samples: bool) -> Any:
        earlier = max(opening.prompt_length - 3, 0)
        return original(index, replace(opening, prompt_length=earlier), automaton, samples=samples)

    wrap(reservation, "constrain_opening", constrain)


@mutant()
def given_output_taken_on_trust() -> None:
    """tokens that the client feeds are not held against the grammar"""

    def why_not(original: Any, self: Automaton, output: Any) -> str:
        original(self, output)
        return ""

    wrap(Automaton, "why_not", why_not)


@mutant()
def grammar_begins_behind_the_last_token_of_its_id() -> None:
    """a further token that begins the grammar begins it anew"""

    def consume(original: Any, self: LateMatcher, tokens: Any) -> int:
        if len(again := np.flatnonzero(tokens == self._late.begins_after)):
            self._free, self._behind = self._free + self._behind + int(again[-1]), 0
            self._matcher = None
            return int(again[-1]) + int(original(self, tokens[again[-1] :]))
        return int(original(self, tokens))

    wrap(LateMatcher, "consume", consume)


@mutant()
def grammar_begins_with_the_output() -> None:
    """the token that a grammar begins behind is ignored"""
    wrap(LateGrammar, "matcher", lambda original, self, *, alone: self.grammar.matcher(alone=alone))


@mutant()
def end_allowed_before_a_grammar_begins() -> None:
    """up to the token that a grammar begins behind, anything is allowed"""

    def mask(original: Any, self: LateMatcher) -> Any:
        found = original(self)
        return found | np.packbits(np.isin(np.arange(8 * len(found)), self._late.ends), bitorder="little")

    wrap(LateMatcher, "mask", mask)
