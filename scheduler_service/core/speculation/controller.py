"""How many drafts each sequence gets in a step, to emit the most tokens per second.

With conditional acceptance probabilities a_1, a_2, ... a verification of k drafts emits 1 + Σ_j Π_{i≤j} a_i
tokens on average; for equal a that is (1 - a^(k+1)) / (1 - a) (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023, arXiv:2211.17192, equation 1). The j-th draft of a sequence is
worth Π_{i≤j} a_i tokens, less than the one before it, and all drafts cost a step the same; so the best m
drafts of all sequences are the m most valuable ones, and m is the one with the best tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_service.core.speculation.step_time import StepTime, Work

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

CAUTION = 1.1  # a draft must be worth this multiple of what it is expected to cost
MIN_VALUE = 0.02  # tokens: a draft that adds less on average is not worth the core's own work
DRAFTING_GAIN = 1.03  # the draft executor must promise this multiple of the rate without it
AMORTIZED = 32  # cycles over which a draft cache's catching up must pay off
PROBE_LENGTH = 4  # drafts of a sequence in a probe
PROBE_EVERY = 32  # choices in a row without drafts until a probe
PROBE_RARELY = 1024  # the same of the draft executor: doubled by each probe that fails, up to this


@dataclass(slots=True)
class Candidate:
    """A sequence that can have drafts."""

    first: float  # probability that the first draft is accepted
    later: float  # that a later one is, if all before it were
    most: int  # drafts: what its pages, budget, end and proposal allow; at least 1


@dataclass(slots=True)
class DraftCandidate:
    """A sequence that the draft executor could draft for."""

    executor: Candidate
    at_once: Candidate | None  # what it could have at once instead
    pending: int  # tokens that its draft cache has to catch up with, at least 1


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """How many drafts the draft executor is asked for, by candidate."""

    lengths: list[int]  # 0: none, the sequence decodes without waiting for drafts
    cohorts: int  # 1: draft for all, then verify all; 2: one half drafts while the other is verified


class Controller:
    """Knows the step times of both executors and chooses the lengths."""

    def __init__(self, most: int) -> None:
        """most: drafts of a sequence in one step."""
        self._most = most
        self.target = StepTime()
        self.draft = StepTime(0.1)  # cheap until it is known, so that it is tried
        self._undrafted = 0  # choices in a row without drafts
        self._idle = 0  # cycles in a row without the draft executor
        self._patience = PROBE_EVERY

    def lengths(self, base: Work, candidates: Sequence[Candidate]) -> list[int]:
        """Lengths (0 included) for drafts that are there: n-grams, forced tokens, drafts that were made.

        base: a step of all running sequences without any of these drafts. Those whose prompts are being
        computed count as if they decoded: they wait for the step as well. While nothing is worth a draft, a
        size of step that has never been seen is tried now and then: only measuring tells what it costs.
        """
        if not candidates:
            return []
        chosen = self._chosen(base, candidates)
        self._undrafted = 0 if any(chosen) else self._undrafted + 1
        if self._undrafted < PROBE_EVERY:
            return chosen
        self._undrafted = 0
        limits = [c.most for c in candidates]
        likely = sorted(range(len(candidates)), key=lambda i: -candidates[i].first)
        probe = self._probe(limits, likely)
        return chosen if self.target.has_seen(_with(base, probe)) else probe

    def _chosen(self, base: Work, candidates: Sequence[Candidate]) -> list[int]:
        """The lengths that promise the most tokens per second.

        A sequence whose first draft is worth too little has no later one that is worth more. Where that holds
        for all of them, which is the common case in text that does not repeat, no array is made.
        """
        least = self._least_value(base, len(candidates) * self._most)
        worthy = [i for i, candidate in enumerate(candidates) if candidate.first >= least]
        lengths = [0] * len(candidates)
        if worthy:
            best, _ = self._best(base, _values([candidates[i] for i in worthy], self._most))
            for i, length in zip(worthy, best.tolist(), strict=True):
                lengths[i] = length
        return lengths

    def _least_value(self, base: Work, drafts: int) -> float:
        """Tokens that the least of up to `drafts` drafts must add on average, to be worth verifying.

        The last draft taken costs at least the smallest of their marginal costs.
        """
        slope = CAUTION * self.target.least_slope(base.tokens, drafts)
        return max(MIN_VALUE, base.rows / self._plain_s(base) * slope)

    def _plain_s(self, base: Work) -> float:
        """Seconds of the step without drafts and prompts."""
        return self.target.seconds(Work(base.rows, base.rows, base.context))

    def drafting(self, base: Work, candidates: Sequence[DraftCandidate]) -> DraftLengths:
        """How many drafts to ask the draft executor for, by candidate (0: none), in one or two cohorts.

        base: a target step without any drafts in which all running sequences decode, the candidates among
        them. Compares the rate without the draft executor (other drafts at once) with that of cycles of
        drafting and verifying, for every number of draft steps. While the draft executor is not worth it,
        a few sequences (one, once the time of such a step is known) try it, after ever more choices without.
        """
        if not candidates:
            return DraftLengths([], 1)
        best = self._best_drafting(base, candidates)
        if any(best.lengths):
            self._idle, self._patience = 0, PROBE_EVERY
            return best
        self._idle += 1
        if self._idle < self._patience:
            return best
        self._idle, self._patience = 0, min(2 * self._patience, PROBE_RARELY)
        limits = [c.executor.most for c in candidates]
        cheap = sorted(range(len(candidates)), key=lambda i: candidates[i].pending)
        probe = self._probe(limits, cheap)
        if self.target.has_seen(_with(base, probe)):
            probe = self._probe(limits, cheap[:1])
        return DraftLengths(probe, 1)

    def _probe(self, limits: list[int], order: list[int]) -> list[int]:
        """A few drafts for the first quarter of `order`: about twice the tokens of a plain step."""
        lengths = [0] * len(limits)
        for i in order[: -(-len(order) // 4)]:
            lengths[i] = min(PROBE_LENGTH, self._most, limits[i])
        return lengths

    def _best_drafting(self, base: Work, candidates: Sequence[DraftCandidate]) -> DraftLengths:
        """See `drafting`: the choice with the best rate, without trials."""
        count = len(candidates)
        at_once = np.zeros(count)  # tokens, by drafts that need no draft step
        at_once_lengths = np.zeros(count, dtype=np.intp)
        best_rate = base.rows / self.target.seconds(base)
        with_others = [i for i, c in enumerate(candidates) if c.at_once is not None]
        if with_others:
            proposals = _values([n for c in candidates if (n := c.at_once) is not None], self._most)
            chosen, best_rate = self._best(base, proposals)
            at_once_lengths[with_others] = chosen
            at_once[with_others] = (proposals * (np.arange(len(proposals))[:, None] < chosen)).sum(axis=0)
        values = _values([c.executor for c in candidates], self._most)
        # A full acceptance leaves up to two tokens that the draft model has not read; each cycle pays for
        # these. What is pending beyond them is read once, and counts as spread over AMORTIZED cycles.
        pending = np.array([c.pending if c.pending < 3 else 2 + c.pending / AMORTIZED for c in candidates])
        best = DraftLengths([0] * count, 1)
        best_rate *= DRAFTING_GAIN
        for _ in range(2):  # what a draft must be worth depends on the rate: once more with the better one
            most = self._worth(base, values, at_once, pending, best_rate)
            taken = np.arange(len(values))[:, None] < most
            drafted = most > 0
            rows = int(np.count_nonzero(drafted))
            if not rows:
                break
            emitted = base.rows + float(at_once[~drafted].sum()) + np.cumsum((values * taken).sum(axis=1))
            tokens = base.tokens + int(at_once_lengths[~drafted].sum()) + np.cumsum(taken.sum(axis=1))
            catching_up = round(float(pending[drafted].sum()))
            for steps in range(1, int(most.max()) + 1):
                for cohorts in (1, 2) if rows > 1 else (1,):
                    drafting = self.draft.seconds(
                        Work(-(-rows // cohorts), -(-catching_up // cohorts), 0, steps)
                    )
                    verifying = self.target.seconds(
                        Work(
                            -(-base.rows // cohorts),
                            -(-int(tokens[steps - 1]) // cohorts),
                            base.context // cohorts,
                        )
                    )
                    cycle = drafting + verifying if cohorts == 1 else 2 * max(drafting, verifying)
                    rate = float(emitted[steps - 1]) / cycle
                    if rate > best_rate:
                        best_rate = rate
                        best = DraftLengths(np.minimum(most, steps).tolist(), cohorts)
        return best

    def _best(self, base: Work, values: Floats) -> tuple[Ints, float]:
        """Lengths by the values of drafts, and the tokens per second that they promise."""
        count = values.shape[1]
        flat = values.ravel()  # all first drafts, then all second ones, ...
        useful = np.flatnonzero(flat >= self._least_value(base, len(flat)))
        order = useful[np.argsort(-flat[useful], kind="stable")]
        rates = np.full(len(order) + 1, base.rows, dtype=np.float64)
        rates[1:] += np.cumsum(flat[order])
        rates /= self._plain_s(base) + CAUTION * self.target.added(base, len(order))
        best = int(rates.argmax())
        return np.bincount(order[:best] % count, minlength=count), float(rates[best])

    def _worth(self, base: Work, values: Floats, at_once: Floats, pending: Floats, rate: float) -> Ints:
        """The most drafts of each sequence that are worth what they alone add to both steps at this rate."""
        count = values.shape[1]
        added = self.target.added(base, 2 * count)
        verify = float(added[-1] - added[count]) / count  # without what the first draft of all costs once
        draft = float(self.draft.added(Work(0, count), 1)[-1])
        most: Ints = np.count_nonzero(values >= CAUTION * rate * (verify + draft), axis=0)
        gained = np.where(np.arange(len(values))[:, None] < most, values, 0.0).sum(axis=0)
        cost = most * (verify + draft) + (pending - 1) * draft
        return np.where((gained > at_once) & (gained >= rate * cost), most, 0)


def _with(base: Work, lengths: list[int]) -> Work:
    """The step with drafts of these lengths."""
    return Work(base.rows, base.tokens + sum(lengths), base.context)


def _values(candidates: Sequence[Candidate], most: int) -> Floats:
    """[draft, sequence]: expected tokens that each draft adds; 0 beyond what the candidate may have."""
    longest = [c.most for c in candidates]
    width = min(most, max(longest))
    values = np.empty((width, len(candidates)))
    values[0] = [c.first for c in candidates]
    values[1:] = [c.later for c in candidates]
    np.cumprod(values, axis=0, out=values)
    if min(longest) < width:
        values[np.arange(width)[:, None] >= longest] = 0.0
    return values
