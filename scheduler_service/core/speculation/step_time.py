"""How long a step takes, fitted online.

The model is linear in its non-negative coefficients, so no work is ever predicted to be cheaper than a
part of it: seconds = Σ over passes of f(tokens fed) + p · prompt tokens + a · attended + s · scored
+ c · context + r if it is ragged. f is piecewise linear between powers of two: a step is about flat while
weights are streamed, then rises (the roofline of Williams et al., 2009). Tokens of prompts have terms of
their own: they need no logits, many of one sequence cost less than as many of several, each attends to all
before it, and some bring scores. A ragged step has rows of more than one token, which may take a slower path
of the executor's.

What is kept is not the history but a cell per size of step: a mean of recent steps of that size, and of
their features. The coefficients are a weighted least-squares fit of the cells, relative errors, under weak
priors: neighbouring slopes are alike, and all are in proportion to a typical step's. So a server that runs
the same step for an hour forgets nothing about others, and nothing can drift that is not measured. They are
fitted when a duration is asked for, which with a fixed number of drafts is seldom.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_KNOTS = 2.0 ** np.arange(13)  # tokens: 1 to 4096, the last segment is open
_WIDTHS = np.append(np.diff(_KNOTS), np.inf)
_SIZE = 6 + len(_KNOTS)  # passes, the slopes of f, prompt, attended, scored, context, ragged
_PROMPT, _ATTENDED, _SCORED, _CONTEXT, _RAGGED = range(_SIZE - 5, _SIZE)

_PRIOR = np.full(_SIZE, 1e-3)  # seconds: a flat 20 ms, from two tokens on 1 ms per token
_PRIOR[:2] = 20e-3, 0.0
_PRIOR[_CONTEXT:] = 1e-7, 0.0
_PRIOR[_PROMPT : _SCORED + 1] = 0.5e-3, 1e-7, 0.25e-3

_MEMORY = 24  # steps that a cell's means rest on at most
_SAMPLED = 4  # of a cell with more steps: one in this many changes the mean of its features, for all of them
_FULL = 8  # steps that give a cell its full weight
_FIRST = 3  # of a cell: the fastest of them counts, the others may have compiled or warmed something
_OUTLIER = 2.0  # a step counts as at most this factor slower or faster than its cell
_HALF_LIFE = 4096  # steps after which an untouched cell weighs half
_CELLS = 128  # kept at most
_REFIT = 16  # steps between fits; the first few dozen steps fit more often
_SMOOTH = 1e-3  # weight of "neighbouring slopes are alike" against a full cell's 1
_SHRINK = 1e-4  # weight of the prior
_LEAST = 1e-3  # of a typical step: what a pass takes at least
_SPAN = 32.0  # tokens over which slopes are compared


@dataclass(slots=True)
class Work:
    """What a step computes.

    A draft step of `steps` > 1 passes feeds `tokens` in its first pass (what its rows catch up with
    included), and one token per row in each later one.
    """

    rows: int  # that decode or verify
    tokens: int  # fed: one per decoding row, and drafts
    context: int = 0  # tokens attended to, summed over the rows
    steps: int = 1  # sequential passes
    prompt: int = 0  # tokens fed of prompts, in the first pass
    attended: int = 0  # for each of these, the tokens of its prompt before it, summed
    scored: int = 0  # of these, those that bring a score


@dataclass(slots=True)
class _Cell:
    """Steps of about the same size."""

    features: Floats  # mean
    seconds: float  # mean
    count: int
    touched: int  # number of the last step that it saw


class StepTime:
    """Seconds of a step as a function of its work. One for the target, one for the draft executor."""

    def __init__(self, scale: float = 1.0) -> None:
        """scale: of the prior, which is a step of 20 ms."""
        self._prior = _PRIOR * scale
        self._cells: dict[tuple[int, ...], _Cell] = {}
        self._observed = 0
        self._is_stale = False  # steps were observed that the coefficients have to be fitted to
        self._take(self._prior)

    def observe(self, work: Work, seconds: float) -> None:
        """A step of this work took so long."""
        if work.tokens + work.prompt < 1 or not seconds > 0:
            return
        self._observed += 1
        key = _size(work)
        cell = self._cells.get(key)
        if cell is None:
            if len(self._cells) >= _CELLS:
                del self._cells[min(self._cells, key=lambda key: self._cells[key].touched)]
            self._cells[key] = _Cell(_features(work), seconds, 1, self._observed)
            self._is_stale = True
            return
        cell.count += 1
        cell.touched = self._observed
        if cell.count <= _MEMORY:
            cell.features += (_features(work) - cell.features) / cell.count
        elif not cell.count % _SAMPLED:
            cell.features += (_features(work) - cell.features) * (_SAMPLED / _MEMORY)
        if cell.count <= _FIRST:
            cell.seconds = min(cell.seconds, seconds)
        else:
            bounded = min(max(seconds, cell.seconds / _OUTLIER), cell.seconds * _OUTLIER)
            cell.seconds += (bounded - cell.seconds) / min(cell.count, _MEMORY)
        if cell.count <= _FIRST or not self._observed % _REFIT:
            self._is_stale = True

    def has_seen(self, work: Work) -> bool:
        """Steps of about this size have been seen, and not too long ago."""
        cell = self._cells.get(_size(work))
        return cell is not None and cell.count >= _FIRST and self._observed - cell.touched < _HALF_LIFE

    def seconds(self, work: Work) -> float:
        """Expected duration; never less for more work."""
        self._fit_if_stale()
        first = self._curve(work.tokens)
        later = (work.steps - 1) * self._curve(work.rows) if work.steps > 1 else 0.0
        ragged = self._ragged if _is_ragged(work) else 0.0
        prompt = self._prompt * work.prompt + self._attended * work.attended + self._scored * work.scored
        return first + later + prompt + self._context * work.context * work.steps + ragged

    def prompt_s(self, kv: int, tokens: int, scored: int, *, first: bool) -> float:
        """Seconds that `tokens` of a prompt, `scored` of them with a score, add to a step that decodes.

        kv: tokens of the prompt before them. first: no other prompt has tokens in the step.
        """
        self._fit_if_stale()
        seconds = self._prompt * tokens + self._attended * attended(kv, tokens) + self._scored * scored
        return seconds + self._context * (kv + tokens) + (self._ragged if first else 0.0)

    def added(self, base: Work, most: int) -> Floats:
        """Seconds that 0, 1, ... `most` more tokens add to the first pass of `base`."""
        self._fit_if_stale()
        tokens = base.tokens
        at = np.arange(tokens, tokens + most + 1, dtype=np.float64)
        values = np.interp(at, _KNOTS, self._values)
        if tokens + most > _KNOTS[-1]:
            values += self._last_slope * np.maximum(at - _KNOTS[-1], 0.0)
        added: Floats = values - values[0]
        if not _is_ragged(base):
            added[at > base.rows] += self._ragged
        return added

    def least_slope(self, tokens: int, most: int) -> float:
        """The least seconds that one of the `most` tokens after `tokens` adds by itself to a pass."""
        self._fit_if_stale()
        last = len(_KNOTS) - 1
        first, end = (min(count.bit_length() - 1, last) for count in (tokens, tokens + most - 1))
        return min(self._slopes[first : end + 1])

    def _curve(self, tokens: int) -> float:
        if not tokens:
            return self._value_list[0]
        segment = min(tokens.bit_length() - 1, len(_KNOTS) - 1)
        return self._value_list[segment] + self._slopes[segment] * (tokens - (1 << segment))

    def _take(self, theta: Floats) -> None:
        self._slopes: list[float] = theta[1:_PROMPT].tolist()
        self._values = theta[0] + np.concatenate(([0.0], np.cumsum(theta[1 : _PROMPT - 1] * _WIDTHS[:-1])))
        self._value_list: list[float] = self._values.tolist()
        self._last_slope = self._slopes[-1]
        self._prompt, self._attended, self._scored, self._context, self._ragged = map(float, theta[_PROMPT:])

    def _fit_if_stale(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        cells = list(self._cells.values())
        seconds = np.array([cell.seconds for cell in cells])
        age = self._observed - np.array([cell.touched for cell in cells])
        weight = np.minimum([cell.count for cell in cells], _FULL) / _FULL * 0.5 ** (age / _HALF_LIFE)
        features = np.array([cell.features for cell in cells])
        ratio = np.average(np.log(seconds / (features @ self._prior)), weights=weight)
        prior = self._prior * np.exp(ratio)
        # In units of the prior's typical step, so that weights of data and priors compare.
        relative = features / seconds[:, None]
        root = np.sqrt(weight)[:, None]
        rows = np.vstack((relative * root, _PENALTIES / prior[0]))
        goals = np.concatenate((root[:, 0], _PENALTIES @ prior / prior[0]))
        theta = _non_negative(rows, goals)
        theta[0] = max(theta[0], _LEAST * prior[0])
        self._take(theta)


def _penalties() -> Floats:
    """Rows of the least-squares problem that hold the priors, per second of a typical step."""
    rows = []
    span = np.full(len(_KNOTS), _SPAN)
    shrink = np.concatenate(([1.0], span, [_SPAN, 1e5, _SPAN, 1e5, 20.0]))
    for i in range(_SIZE):
        row = np.zeros(_SIZE)
        row[i] = np.sqrt(_SHRINK) * shrink[i] * 0.05 ** (i > 0)
        rows.append(row)
    for i in range(2, _PROMPT):
        row = np.zeros(_SIZE)
        row[i], row[i - 1] = np.sqrt(_SMOOTH) * span[i - 1], -np.sqrt(_SMOOTH) * span[i - 1]
        rows.append(row)
    return np.array(rows)


_PENALTIES = _penalties()


def _non_negative(rows: Floats, goals: Floats) -> Floats:
    """Least squares with coefficients of at least 0: what comes out negative is 0, the rest is refitted."""
    matrix, vector = rows.T @ rows, rows.T @ goals
    free = np.arange(_SIZE)
    theta = np.zeros(_SIZE)
    while len(free):
        solution = np.linalg.solve(matrix[np.ix_(free, free)], vector[free])
        if (solution >= 0).all():
            theta[free] = solution
            break
        free = free[solution > 0]
    return theta


@lru_cache(maxsize=4096)
def _pass(tokens: int) -> Floats:
    """Features of one pass."""
    features = np.zeros(_SIZE)
    features[0] = 1.0
    features[1:_PROMPT] = np.clip(tokens - _KNOTS, 0.0, _WIDTHS)
    return features


def _features(work: Work) -> Floats:
    features = _pass(work.tokens).copy()
    if work.steps > 1:
        features += (work.steps - 1) * _pass(work.rows)
    features[_PROMPT:_CONTEXT] = work.prompt, work.attended, work.scored
    features[_CONTEXT:] = work.context * work.steps, _is_ragged(work)
    return features


def attended(kv: int, tokens: int) -> int:
    """`Work.attended` of `tokens` of a prompt after its first `kv`."""
    return tokens * kv + tokens * (tokens - 1) // 2


def _is_ragged(work: Work) -> bool:
    return work.tokens > work.rows or work.prompt > 0


def _size(work: Work) -> tuple[int, ...]:
    """What steps of about the same size share.

    Tokens (eight ranges to each doubling, two of a prompt's), whether most of them bring scores, and how far
    the prompt is.
    """
    tokens = work.tokens + (work.steps - 1) * work.rows
    before = (work.attended // work.prompt >> 9).bit_length() if work.prompt else 0
    scored = 2 * work.scored > work.prompt
    return _range(tokens, 4), work.steps, _range(work.prompt, 2), _is_ragged(work), scored, before


def _range(tokens: int, bits: int) -> int:
    shift = max(0, tokens.bit_length() - bits)
    return (tokens >> shift) + (shift << 16)
