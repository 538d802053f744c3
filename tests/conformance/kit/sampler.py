"""Which tokens the sampling rules of executor.proto allow at one position, given the raw logits.

A plain reading of `Sampling`: penalties and bias, stop ids masked until min_tokens, temperature,
top-k, top-p, min-p, noise. It computes in float64 and says how far each token is from being chosen,
so that a caller can forgive what rounding explains and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit import noise

Floats = NDArray[np.float64]

_EDGE = 1e-4
"""How far a probability may lie from a nucleus boundary and still be taken as on either side."""


def shortfall(
    logits: NDArray[np.float32], history: Sequence[int], prompt_length: int, rules: pb.Sampling
) -> Floats:
    """How far each token id falls short of being the choice at position len(history): 0 for the choice.

    `logits` is [vocabulary], raw; `history` holds prompt and output so far, history[prompt_length:]
    being output. In units of logits / temperature (of logits when greedy).
    """
    scores = adjusted(logits, history, prompt_length, rules)
    if rules.temperature == 0:
        return scores.max() - scores
    scores = scores / rules.temperature
    gumbel = noise.gumbel(rules.seed, len(history), len(scores))
    # Both readings of a boundary case are right; the kinder one counts.
    readings = [np.where(_kept(scores, rules, edge), scores + gumbel, -np.inf) for edge in (-_EDGE, _EDGE)]
    return np.minimum(*(reading.max() - reading for reading in readings))


def adjusted(
    logits: NDArray[np.float32], history: Sequence[int], prompt_length: int, rules: pb.Sampling
) -> Floats:
    """Logits after penalties, bias and the min_tokens mask: [vocabulary]."""
    scores = logits.astype(np.float64)
    if rules.HasField("repetition_penalty"):
        seen = np.unique(np.asarray(history, dtype=np.int64))
        penalty = rules.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    for token, count in Counter(history[prompt_length:]).items():
        scores[token] -= rules.presence_penalty + rules.frequency_penalty * count
    for token, bias in rules.logit_bias.items():
        scores[token] += bias
    if len(history) - prompt_length < rules.min_tokens:
        scores[list(rules.stop_token_ids)] = -np.inf
    return scores


def _kept(scores: Floats, rules: pb.Sampling, edge: float) -> NDArray[np.bool_]:
    kept = scores > -np.inf
    if rules.top_k and rules.top_k < len(scores):
        best = np.argsort(-scores, kind="stable")[: rules.top_k]  # of equals the lowest ids
        among = np.zeros_like(kept)
        among[best] = True
        kept &= among if edge < 0 else scores >= scores[best[-1]] - edge
    if rules.HasField("top_p"):
        order = np.argsort(-np.where(kept, scores, -np.inf), kind="stable")
        probability = _softmax(np.where(kept, scores, -np.inf))[order]
        before = np.cumsum(probability) - probability  # a token is in while those before it do not suffice
        kept[order] &= (before < rules.top_p + edge) | (np.arange(len(order)) == 0)
    if rules.min_p:
        probability = _softmax(np.where(kept, scores, -np.inf))
        most = probability.max()
        kept &= probability >= min(rules.min_p * most * (1 - edge), most)
    return kept


def _softmax(scores: Floats) -> Floats:
    exp: Floats = np.exp(scores - scores.max())
    return exp / exp.sum()


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    """Log-probabilities of raw logits, along the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: Floats = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result
