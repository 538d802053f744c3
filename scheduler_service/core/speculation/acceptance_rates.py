"""How likely a draft is to be accepted, given that all before it were.

An estimate is a rate that forgets, and starts from the population's:
(hits + WEIGHT · population's rate) / (trials + WEIGHT), the posterior mean under a beta prior that is worth
WEIGHT trials. So a new sequence starts from what others saw, and has its own view after a few tokens.
"""

from __future__ import annotations

WEIGHT = 3.0  # trials
MEMORY = 48.0  # trials that a sequence's estimate rests on at most; then it forgets half of them
POPULATION_MEMORY = 1024.0  # the same for the population's
PRIOR_WEIGHT = 16.0  # trials that the population's own prior is worth


class Population:
    """The acceptance rate of one kind of draft over all sequences of a server."""

    __slots__ = ("hits", "trials")

    def __init__(self, prior: float) -> None:
        """prior: the rate before anything was seen."""
        self.hits = prior * PRIOR_WEIGHT
        self.trials = PRIOR_WEIGHT


class Acceptance:
    """A sequence's estimate for one kind of draft."""

    __slots__ = ("_hits", "_population", "_trials")

    def __init__(self, population: Population) -> None:
        self._population = population
        self._hits = self._trials = 0.0

    def rate(self) -> float:
        """Probability that such a draft is accepted if all before it are."""
        population = self._population
        prior = WEIGHT * population.hits / population.trials
        return (self._hits + prior) / (self._trials + WEIGHT)

    def learn(self, hits: int, *, missed: bool) -> None:
        """`hits` such drafts in a row were right, and if `missed` the one after them was not."""
        trials = hits + missed
        self._hits += hits
        self._trials += trials
        if self._trials > MEMORY:
            self._hits *= 0.5
            self._trials *= 0.5
        population = self._population
        population.hits += hits
        population.trials += trials
        if population.trials > POPULATION_MEMORY:
            population.hits *= 0.5
            population.trials *= 0.5
