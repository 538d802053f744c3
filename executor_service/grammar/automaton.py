"""`Automaton`: a sequence's place in its grammar, brought to wherever the sequence is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from executor_service.contract.grammar import Grammar, GrammarStuck, Matcher
from executor_service.contract.masks import Masks
from executor_service.contract.plan import NO_TOKENS, TokenIds

T = TypeVar("T")


class Automaton:
    """A cache of a replay: its state is that of a matcher which was fed the output from the beginning.

    Callers say what the output is, not what has changed: `follow` compares it with the output followed last,
    takes back what differs, and goes on from there. So nothing has to be undone where a sequence is
    truncated, a draft rejected or a step given up.

    A matcher that is stuck is replaced by one that replays the output: what the old one has computed along
    its way counts against its limits, too. The new one may share its limits with matchers of other sequences.
    If it is stuck because of those, a third one decides, whose limits are its own.

    After a GrammarStuck its place may be lost: call `follow` before the next question.

    The mask behind the output is kept until the output is another one, so that it can be computed early.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher: Matcher | None = None
        self._output: TokenIds = NO_TOKENS  # what the matcher has consumed, and room to grow
        self._count = 0  # tokens consumed
        self._mask: Masks | None = None  # behind these; None: not computed

    def follow(self, output: TokenIds) -> int:
        """Go to behind `output`, or before its first token that is not allowed.

        Returns how many tokens were allowed. Raises GrammarStuck.
        """
        common = self._common(output)
        if (matcher := self._matcher) is not None:
            try:
                if common < self._count:
                    self._mask = None
                    matcher.rollback(self._count - common)
                    self._count = common
                return self._consume(matcher, output)
            except GrammarStuck:
                self._matcher = None
        try:
            return self._replay(output)
        except GrammarStuck as error:
            if not error.by_others:
                raise
            return self._replay(output)

    def why_not(self, output: TokenIds) -> str:
        """Go to behind `output`. Returns why the grammar does not allow it; "" if it does."""
        try:
            allowed = self.follow(output)
        except GrammarStuck as error:
            return str(error)
        if allowed == len(output):
            return ""
        return f"the grammar does not allow token {output[allowed]} as number {allowed + 1} of the output"

    def push(self, token: int) -> bool:
        """Go on with one token, if it is allowed; returns whether it is. Raises GrammarStuck."""
        output = np.append(self._output[: self._count], np.int32(token))
        return self.follow(output) == len(output)

    def mask(self) -> Masks:
        """The mask of the next token, [bytes]; it allows at least one. Raises GrammarStuck."""
        if self._mask is None:
            self._mask = self._ask(lambda matcher: matcher.mask())
        return self._mask

    def forced(self) -> list[int]:
        """The next tokens as far as the grammar leaves no choice. Raises GrammarStuck."""
        return self._ask(lambda matcher: matcher.forced())

    def _ask(self, question: Callable[[Matcher], T]) -> T:
        """The answer of the matcher, or of a new one that has replayed the output."""
        if (matcher := self._matcher) is not None:
            try:
                return question(matcher)
            except GrammarStuck:
                self._matcher = None
        output = self._output[: self._count].copy()
        try:
            return self._ask_anew(question, output)
        except GrammarStuck as error:
            if not error.by_others:
                raise
            return self._ask_anew(question, output)

    def _ask_anew(self, question: Callable[[Matcher], T], output: TokenIds) -> T:
        """The answer of a new matcher behind `output`. Raises GrammarStuck."""
        self._replay(output)
        matcher, self._matcher = self._matcher, None
        assert matcher is not None
        answer = question(matcher)
        self._matcher = matcher
        return answer

    def _replay(self, output: TokenIds) -> int:
        """As `follow`, by a new matcher. Raises GrammarStuck."""
        self._count, self._mask = 0, None
        matcher = self._grammar.matcher()
        taken = self._consume(matcher, output)
        self._matcher = matcher
        return taken

    def _common(self, output: TokenIds) -> int:
        """How many first tokens `output` (int32) has in common with those consumed."""
        shorter = min(self._count, len(output))
        mine, theirs = self._output[:shorter], output[:shorter]
        if mine.tobytes() == theirs.tobytes():  # as mostly; faster than comparing item by item
            return shorter
        return int((mine != theirs).argmax())

    def _consume(self, matcher: Matcher, output: TokenIds) -> int:
        """Consume what `output` has behind the tokens consumed so far."""
        taken = self._count
        if len(output) > taken:
            self._mask = None
            taken += matcher.consume(output[taken:])
            if taken > len(self._output):
                grown = np.zeros(max(2 * taken, 64), np.int32)
                grown[: self._count] = self._output[: self._count]
                self._output = grown
            self._output[self._count : taken] = output[self._count : taken]
            self._count = taken
        return taken
