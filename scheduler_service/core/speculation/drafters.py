"""A sequence's drafters as the planner sees them: a candidate for the controller, and the drafts."""

from __future__ import annotations

from scheduler_service.core.speculation.acceptance_rates import Acceptance, Population
from scheduler_service.core.speculation.controller import Candidate
from scheduler_service.core.speculation.ngram import UPDATE_BUDGET, NgramIndex

_AHEAD = 3
"""Drafts after the first lie on a match that has grown by a few tokens: they count as one of this more."""
_LONG = 16
_FIRST = (0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5)
"""The class of the first draft by match length: 2, 3, 4-5, 6-8, 9-15, _LONG and more."""
_LATER = tuple(_FIRST[min(length + _AHEAD, _LONG)] for length in range(_LONG + 1))
"""The class of those after it."""


def ngram_populations() -> tuple[Population, ...]:
    """A population for each class of match lengths."""
    return tuple(Population(prior) for prior in (0.25, 0.35, 0.45, 0.55, 0.7, 0.85))


def grammar_population() -> Population:
    """The population of forced tokens, which are right unless the executor's hint and its masks disagree."""
    return Population(0.98)


def executor_population() -> Population:
    """Of the draft executor's drafts."""
    return Population(0.7)


class NgramDrafter:
    """The n-gram drafter of one sequence: its index, and the acceptance it learns from every token.

    Each token is compared with what the index had predicted, drafted or not: plain steps teach it as well,
    and nothing needs to be tried out.
    """

    __slots__ = ("_classes", "index")

    def __init__(self, tokens: list[int], populations: tuple[Population, ...]) -> None:
        """tokens: the sequence's own list, prompt and output, which only grows. See `NgramIndex`."""
        self.index = NgramIndex(tokens)
        self._classes = tuple([Acceptance(population) for population in populations])

    def update(self, budget: int = UPDATE_BUDGET, stride: int = 1) -> int:
        """Learn from the appended tokens, and index at most `budget` tokens; returns how many were indexed.

        stride: index every `stride`-th pair only, as in `NgramIndex.update`.

        Call it after every append, and in every step while `index.lag`, from the prefill on.
        """
        index = self.index
        indexed = index.update(budget, stride)
        followed, broke = index.followed, index.broke
        if followed or broke:
            length = index.scored_from
            if length > _LONG:
                length = _LONG
            first = self._classes[_FIRST[length]]
            if not followed:
                first.learn(0, missed=True)
            else:
                first.learn(1, missed=False)
                if followed > 1 or broke:
                    self._classes[_LATER[length]].learn(followed - 1, missed=broke)
        return indexed

    def candidate(self, most: int) -> Candidate | None:
        """What the controller needs to know for up to `most` drafts; None: there is nothing to propose."""
        length = self.index.match_length
        if not length or most < 1:
            return None
        if length > _LONG:
            length = _LONG
        classes = self._classes
        return Candidate(classes[_FIRST[length]].rate(), classes[_LATER[length]].rate(), most)

    def drafts(self, count: int) -> tuple[int, ...]:
        """The `count` drafts, if there is a candidate."""
        return tuple(self.index.propose(count))


class VerifiedDrafter:
    """A drafter that learns its acceptance from the verifications of its own drafts."""

    __slots__ = ("_acceptance",)

    def __init__(self, population: Population) -> None:
        self._acceptance = Acceptance(population)

    def verified(self, drafted: int, accepted: int) -> None:
        """A verification of `drafted` of its drafts accepted the first `accepted`."""
        self._acceptance.learn(accepted, missed=accepted < drafted)


class GrammarDrafter(VerifiedDrafter):
    """The tokens that one sequence's grammar forces, as far as the target has sent them."""

    __slots__ = ("_known", "_tokens")

    def __init__(self, population: Population) -> None:
        super().__init__(population)
        self._known = 0
        self._tokens: tuple[int, ...] = ()

    def tell(self, known: int, tokens: tuple[int, ...]) -> None:
        """Record that these tokens come after the first `known` ones."""
        self._known, self._tokens = known, tokens

    def drafts(self, known: int) -> tuple[int, ...]:
        """What comes after the first `known` tokens; empty: it is not known."""
        return self._tokens if known == self._known else ()

    def candidate(self, known: int, most: int) -> Candidate | None:
        """A candidate of up to `most` drafts after the first `known` tokens; None: there are none."""
        count = min(most, len(self.drafts(known)))
        if count < 1:
            return None
        rate = self._acceptance.rate()
        return Candidate(rate, rate, count)


class ExecutorDrafter(VerifiedDrafter):
    """What is known of one sequence's drafts from the draft executor."""

    __slots__ = ()

    def candidate(self, most: int) -> Candidate | None:
        """For up to `most` drafts; None if that is 0."""
        if most < 1:
            return None
        rate = self._acceptance.rate()
        return Candidate(rate, rate, most)
