"""A sequence's drafters as the planner sees them: a candidate for the controller, and the drafts."""

from __future__ import annotations

from scheduler_service.core.speculation.acceptance import Acceptance, Pool
from scheduler_service.core.speculation.controller import Candidate
from scheduler_service.core.speculation.ngram import UPDATE_BUDGET, NgramIndex

_CLASSES = (0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4)
"""By match length: 2, 3, 4-5, 6-8, 9-15; what is longer is class 5."""
_LONG = 5
_AHEAD = 3
"""Drafts after the first lie on a match that has grown by a few tokens: they count as one of this more."""


def _class(match_length: int) -> int:
    return _CLASSES[match_length] if match_length < len(_CLASSES) else _LONG


class NgramDrafter:
    """The n-gram drafter of one sequence: its index, and the acceptance it learns from every token.

    Each token is compared with what the index had predicted, drafted or not: plain steps teach it as well,
    and nothing needs to be tried out.
    """

    __slots__ = ("_acceptance", "index")

    def __init__(self, tokens: list[int], pool: Pool) -> None:
        """tokens: the sequence's own list, prompt and output, which only grows. See `NgramIndex`."""
        self.index = NgramIndex(tokens)
        self._acceptance = Acceptance(pool)

    def update(self, budget: int = UPDATE_BUDGET) -> int:
        """Learn from what was appended, and index at most `budget` tokens; returns how many were.

        Call it after every append, and in every step while `index.behind`, from the prefill on.
        """
        index = self.index
        indexed = index.update(budget)
        followed = index.followed
        if followed:
            learn = self._acceptance.learn
            learn(1, False, _class(index.scored_from))
            if followed > 1 or index.broke:
                learn(followed - 1, index.broke, _class(index.scored_from + _AHEAD))
        elif index.broke:
            self._acceptance.learn(0, True, _class(index.scored_from))
        return indexed

    def candidate(self, most: int) -> Candidate | None:
        """What the controller needs to know for up to `most` drafts; None: there is nothing to propose."""
        length = self.index.match_length
        if not length or most < 1:
            return None
        rate = self._acceptance.rate
        return Candidate(rate(_class(length)), rate(_class(length + _AHEAD)), most)

    def drafts(self, count: int) -> tuple[int, ...]:
        """The `count` drafts, if there is a candidate."""
        return tuple(self.index.propose(count))


class ExecutorDrafter:
    """What is known of one sequence's drafts from the draft executor."""

    __slots__ = ("_acceptance",)

    def __init__(self, pool: Pool) -> None:
        self._acceptance = Acceptance(pool)

    def verified(self, drafted: int, accepted: int) -> None:
        """A verification of `drafted` of its drafts accepted the first `accepted`."""
        self._acceptance.learn(accepted, accepted < drafted)

    def candidate(self, most: int) -> Candidate | None:
        """For up to `most` drafts; None if that is 0."""
        if most < 1:
            return None
        rate = self._acceptance.rate()
        return Candidate(rate, rate, most)
