"""`Automaton`: a sequence's place in its grammar, brought to wherever the sequence is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from executor_service.contract.grammar import Grammar, GrammarStuck, Matcher, ReplayUnfinished
from executor_service.contract.masks import Masks
from executor_service.contract.plan import NO_TOKENS, TokenIds
from executor_service.grammar.replay_budget import ReplayAccount, ReplayBudget

T = TypeVar("T")

MAX_NEW_TOKENS = 65
"""That a row can have sampled: its drafts and one more. To follow more of them counts as a replay."""


class Automaton:
    """A cache of a replay: its state is that of a matcher which was fed the output from the beginning.

    Callers say what the output is, not what has changed: `follow` compares it with the output followed last,
    takes back what differs, and goes on from there. So nothing has to be undone where a sequence is
    truncated, a draft rejected or a step given up.

    A matcher that is stuck is replaced by one that replays the output: what the old one has computed along
    its way counts against its limits, too. The new one may share its limits with matchers of other sequences.
    If it is stuck because of those, a third one decides, whose limits are its own.

    After a GrammarStuck its place may be lost: call `follow` before the next question.

    A replay ends early where its budget is used up, by ReplayUnfinished; the next `follow` goes on with it.

    The mask after the output is kept until the output is another one, so that it can be computed early.
    """

    def __init__(self, grammar: Grammar, budget: ReplayBudget | None = None) -> None:
        """`budget`: of its replays; None: they take what they take."""
        self.grammar = grammar
        self.unfinished: TokenIds | None = None
        """The output followed last, if its replay is unfinished."""
        self._account = ReplayAccount(budget or ReplayBudget())
        self._matcher: Matcher | None = None
        self._replaying = False  # the matcher was not behind the output yet
        self._pristine = True  # the matcher has computed nothing but the output's tokens
        self._alone = False  # the matcher, or the next one, shares its limits with no other
        self._output: TokenIds = NO_TOKENS  # what the matcher has consumed, and room to grow
        self._count = 0  # tokens consumed
        self._mask: Masks | None = None  # after these; None: not computed
        self._verdict: tuple[TokenIds, str] | None = None  # an output whose replay was stuck, and why

    def follow(self, output: TokenIds) -> int:
        """Go to the end of `output`, or before its first token that is not allowed.

        Returns how many tokens were allowed. Raises GrammarStuck and ReplayUnfinished.
        """
        self.unfinished = None
        if self._verdict is not None and np.array_equal(self._verdict[0], output):
            raise GrammarStuck(self._verdict[1])
        while True:
            try:
                return self._go_to(output)
            except ReplayUnfinished:
                self.unfinished = output.copy()
                raise
            except GrammarStuck as error:
                if self._decides(error):
                    self._verdict = output.copy(), str(error)
                    raise

    def why_not(self, output: TokenIds) -> str:
        """Go to the end of `output`. Returns why the grammar does not allow it; "" if it does.

        Raises ReplayUnfinished.
        """
        try:
            allowed = self.follow(output)
        except GrammarStuck as error:
            return str(error)
        if allowed == len(output):
            return ""
        return f"the grammar does not allow token {output[allowed]} as number {allowed + 1} of the output"

    def push(self, token: int) -> bool:
        """Go on with one token, if it is allowed; returns whether it is.

        Raises GrammarStuck and ReplayUnfinished.
        """
        output = np.append(self._output[: self._count], np.int32(token))
        return self.follow(output) == len(output)

    def mask(self) -> Masks:
        """The mask of the next token, [bytes]; it allows at least one.

        Raises GrammarStuck and ReplayUnfinished; then the output has to be followed again.
        """
        if self._mask is None:
            self._mask = self._ask(lambda matcher: matcher.mask())
        return self._mask

    def forced(self) -> list[int]:
        """The next tokens as far as the grammar leaves no choice. Raises as `mask`."""
        return self._ask(lambda matcher: matcher.forced())

    def _ask(self, question: Callable[[Matcher], T]) -> T:
        """The answer of the matcher, or of a new one that has replayed the output."""
        while True:
            if self._matcher is None:
                self.follow(self._output[: self._count].copy())
            assert self._matcher is not None
            try:
                answer = question(self._matcher)
                self._pristine = False
                return answer
            except GrammarStuck as error:
                if self._decides(error):
                    raise

    def _decides(self, error: GrammarStuck) -> bool:
        """Whether a new matcher would be stuck, too. This one is gone; the next may have to be `_alone`."""
        pristine, shared = self._pristine, error.by_others and not self._alone
        self._matcher, self._alone = None, pristine and shared
        return pristine and not shared

    def _go_to(self, output: TokenIds) -> int:
        """As `follow`, by its matcher or a new one."""
        if self._matcher is None:
            self._count, self._mask, self._replaying, self._pristine = 0, None, True, True
            self._matcher = self.grammar.matcher(alone=self._alone)
        elif (common := self._common(output)) < self._count:
            self._mask, self._pristine = None, False
            self._matcher.rollback(self._count - common)
            self._count = common
        left = len(output) - self._count
        if self._replaying or left > MAX_NEW_TOKENS:
            self._replaying = True
            for size in self._account.pieces(left):
                if not self._consume(self._matcher, output[self._count : self._count + size]):
                    break
            else:
                if self._count < len(output):
                    raise ReplayUnfinished
            self._replaying = False
        elif left:
            self._consume(self._matcher, output[self._count :])
        return self._count

    def _common(self, output: TokenIds) -> int:
        """How many first tokens `output` (int32) has in common with those consumed."""
        shorter = min(self._count, len(output))
        mine, theirs = self._output[:shorter], output[:shorter]
        if mine.tobytes() == theirs.tobytes():  # as mostly; faster than comparing item by item
            return shorter
        return int((mine != theirs).argmax())

    def _consume(self, matcher: Matcher, tokens: TokenIds) -> bool:
        """Consume tokens after those consumed so far; whether all of them were allowed."""
        self._mask = None
        taken = matcher.consume(tokens)
        before, self._count = self._count, self._count + taken
        if self._count > len(self._output):
            grown = np.zeros(max(2 * self._count, 64), np.int32)
            grown[:before] = self._output[:before]
            self._output = grown
        self._output[before : self._count] = tokens[:taken]
        return taken == len(tokens)
