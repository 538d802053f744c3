"""How likely a draft is to be accepted, given that all before it were.

An estimate is a decayed rate that starts from the population's:
(hits + WEIGHT · pool rate) / (trials + WEIGHT), the posterior mean under a beta prior that is worth
WEIGHT trials. So a new sequence starts from what others saw, and has its own view after a few tokens.
"""

from __future__ import annotations

WEIGHT = 3.0  # trials
MEMORY = 48.0  # trials that a sequence's estimate rests on at most
POOL_MEMORY = 1024.0  # the same for a pool
PRIOR_WEIGHT = 16.0  # trials that a pool's own prior is worth


class Pool:
    """The population's acceptance rates of one drafter, by class. One for all sequences of a server."""

    __slots__ = ("hits", "rates", "trials")

    def __init__(self, prior: tuple[float, ...]) -> None:
        """prior: the rate of each class before anything was seen."""
        self.rates = list(prior)
        self.hits = [rate * PRIOR_WEIGHT for rate in prior]
        self.trials = [PRIOR_WEIGHT] * len(prior)


def ngram_pool() -> Pool:
    """The pool of the n-gram drafter: a class is a range of match lengths, see `drafters`."""
    return Pool((0.25, 0.35, 0.45, 0.55, 0.7, 0.85))


def executor_pool() -> Pool:
    """The pool of the draft executor, of one class."""
    return Pool((0.7,))


class Acceptance:
    """A sequence's estimates, one per class of its pool."""

    __slots__ = ("_hits", "_pool", "_trials")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._hits = [0.0] * len(pool.rates)
        self._trials = [0.0] * len(pool.rates)

    def rate(self, kind: int = 0) -> float:
        """Probability that a draft of this class is accepted if all before it are."""
        return (self._hits[kind] + WEIGHT * self._pool.rates[kind]) / (self._trials[kind] + WEIGHT)

    def learn(self, hits: int, missed: bool, kind: int = 0) -> None:
        """`hits` drafts in a row were right, and if `missed` the one after them was not."""
        trials = hits + missed
        if not trials:
            return
        own_hits, own_trials, pool = self._hits, self._trials, self._pool
        kept = 1.0 - trials / MEMORY if trials < MEMORY else 0.0
        own_hits[kind] = own_hits[kind] * kept + hits
        own_trials[kind] = own_trials[kind] * kept + trials
        kept = 1.0 - trials / POOL_MEMORY if trials < POOL_MEMORY else 0.0
        pool.hits[kind] = pooled = pool.hits[kind] * kept + hits
        pool.trials[kind] = pool_trials = pool.trials[kind] * kept + trials
        pool.rates[kind] = pooled / pool_trials
