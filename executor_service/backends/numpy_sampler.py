"""The sampler in numpy: the reference implementation of `plan.Sampling`.

`sample` computes one row, position by position; `sample_rows` computes a batch, with all rows that have no
penalties, masks or filters vectorized, and gives the same result. A token is a pure function of its logits,
its history and its sampling parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.contract import noise
from executor_service.contract.masks import Masks, allowed_tokens
from executor_service.contract.plan import MIN_TEMPERATURE, OutputMode, Sampling, TokenIds

Logits = NDArray[np.float32]
"""fp32; [vocabulary] for one position, [outputs, vocabulary] for several."""


def sample_rows(logits: Logits, rows: Sequence[ForwardRow]) -> list[RowOutput]:
    """One output per row; `logits` [sum of outputs, V]: those of the rows' output positions, in order."""
    finite: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(logits), axis=1)
    all_finite = bool(finite.all())
    tokens = np.zeros(len(logits), dtype=np.int32)
    greedy: list[int] = []
    noisy: list[int] = []
    noisy_keys: list[tuple[int, int, float]] = []  # seed, position, temperature
    outputs: list[RowOutput] = []
    first = 0
    for row in rows:
        last = first + row.outputs
        if not all_finite and not finite[first:last].all():
            outputs.append(RowOutput(finite=False))
        elif not _is_plain(row):
            outputs.append(sample(logits[first:last], row))
        else:
            sampling = row.sampling
            if sampling.temperature == 0:
                greedy.extend(range(first, last))
            else:
                noisy.extend(range(first, last))
                end = len(row.history) + 1
                for position in range(end - row.outputs, end):
                    noisy_keys.append((sampling.seed, position, sampling.temperature))
            outputs.append(RowOutput(tokens=tokens[first:last]))  # a view, filled below
        first = last
    if greedy:
        tokens[greedy] = _select(logits, greedy).argmax(axis=1)
    if noisy:
        seeds, positions, temperatures = zip(*noisy_keys, strict=True)
        keys = noise.keys(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64))
        divisors = np.maximum(np.array(temperatures, dtype=np.float32), np.float32(MIN_TEMPERATURE))
        scores = _select(logits, noisy) / divisors[:, None]
        scores += noise.gumbel(keys[:, None], np.arange(logits.shape[1], dtype=np.int32))
        tokens[noisy] = scores.argmax(axis=1)
    return outputs


def sample(logits: Logits, row: ForwardRow) -> RowOutput:
    """The output of one row; `logits` [row.outputs, V]: those of its output positions."""
    if not np.isfinite(logits).all():
        return RowOutput(finite=False)
    if row.output == OutputMode.NONE:
        return RowOutput()
    if row.output == OutputMode.FULL:
        return RowOutput(logits=logits)
    if row.output == OutputMode.TOP_K:
        ids, logprobs = most_likely(logits, row.top_k)
        return RowOutput(top_ids=ids, top_logprobs=logprobs)
    end = len(row.history) + 1
    scores = logits if row.masks is None else exclude(logits, row.masks)
    chosen = [
        choose(position_logits, row.history[:length], row.prompt_length, row.sampling)
        for position_logits, length in zip(scores, range(end - row.outputs, end), strict=True)
    ]
    output = RowOutput(tokens=np.array(chosen, dtype=np.int32))
    if row.sampling.logprobs is not None:
        output.logprobs = log_softmax(logits)[np.arange(len(chosen)), output.tokens]
        if row.sampling.logprobs > 0:
            output.top_ids, output.top_logprobs = most_likely(logits, row.sampling.logprobs)
    return output


def exclude(logits: Logits, masks: Masks) -> Logits:
    """The logits [outputs, V], with -inf for the tokens that the masks do not allow.

    Penalties and bias leave -inf as it is, so that this may come before them.
    """
    return np.where(allowed_tokens(masks, logits.shape[1]), logits, np.float32(-np.inf))


def choose(logits: Logits, history: TokenIds, prompt_length: int, sampling: Sampling) -> int:
    """The token that follows `history` (prompt, then output), given its raw logits [V]."""
    logits = adjust(logits, history, prompt_length, sampling)
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits / np.float32(max(sampling.temperature, MIN_TEMPERATURE))
    ids = keep(scaled, sampling)
    scores = scaled[ids] + noise.gumbel(noise.key(sampling.seed, len(history)), ids)
    return int(ids[scores.argmax()])


def adjust(logits: Logits, history: TokenIds, prompt_length: int, sampling: Sampling) -> Logits:
    """`adjust_in_place`, applied to a copy."""
    logits = logits.copy()
    adjust_in_place(logits, history, prompt_length, sampling)
    return logits


def adjust_in_place(logits: Logits, history: TokenIds, prompt_length: int, sampling: Sampling) -> None:
    """Penalties, logit bias and the stop mask, for the token that follows `history`; logits [V].

    The stop mask is dropped if it would exclude every token; the sequence then ends before `min_tokens`.
    """
    output = history[prompt_length:]
    if sampling.repetition_penalty != 1:
        penalty, seen = np.float32(sampling.repetition_penalty), logits[history]
        # A token that is there several times gets the same logit each time.
        logits[history] = np.where(seen > 0, seen / penalty, seen * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        ids, counts = np.unique(output, return_counts=True)
        logits[ids] -= np.float32(sampling.presence_penalty)
        logits[ids] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    for token, bias in sampling.logit_bias:
        logits[token] += np.float32(bias)
    if sampling.stop_token_ids and len(output) < sampling.min_tokens:
        stops = list(sampling.stop_token_ids)
        kept = logits[stops]
        logits[stops] = -np.inf
        if logits.max() == -np.inf:
            logits[stops] = kept


def keep(scaled: Logits, sampling: Sampling) -> NDArray[np.int64]:
    """The ids that top-k, top-p and min-p keep, ascending; at least one.

    The filters apply in this order, each to the renormalized result of the one before: top-p keeps the
    smallest set of most likely ids with a mass of at least p (in fp64), min-p keeps ids at least `min_p`
    times as likely as the most likely. Of equal logits, the lower id counts as more likely.
    """
    if sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.min_p <= 0:
        return np.arange(len(scaled))
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    weights = np.exp(scaled[order].astype(np.float64) - scaled[order[0]])  # relative to the most likely
    if sampling.top_p < 1:
        mass = np.cumsum(weights)
        count = int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1
        order, weights = order[:count], weights[:count]
    if sampling.min_p > 0:
        order = order[weights >= min(sampling.min_p, 1.0)]
    return np.sort(order)


def log_softmax(logits: Logits) -> NDArray[np.float32]:
    """Log probabilities over the last axis, computed in fp64; fp32 and finite."""
    shifted: NDArray[np.float64] = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return np.maximum(shifted, np.finfo(np.float32).min).astype(np.float32)


def most_likely(logits: Logits, k: int) -> tuple[TokenIds, NDArray[np.float32]]:
    """Ids and logprobs [outputs, min(k, V)] of the k largest logits, most likely first."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k].astype(np.int32)
    return ids, np.take_along_axis(log_softmax(logits), ids, axis=-1)


def _is_plain(row: ForwardRow) -> bool:
    """Whether the row asks for tokens alone, each argmax(logits / temperature + noise)."""
    s = row.sampling
    return (
        s.repetition_penalty == 1
        and s.top_p >= 1
        and s.top_k <= 0
        and s.min_p <= 0
        and s.presence_penalty == 0
        and s.frequency_penalty == 0
        and not s.logit_bias
        and s.logprobs is None
        and (s.min_tokens == 0 or not s.stop_token_ids)
        and row.output == OutputMode.SAMPLE
        and row.masks is None
    )


def _select(logits: Logits, positions: list[int]) -> Logits:
    """The logits of some positions; no copy if these are all positions."""
    return logits if len(positions) == len(logits) else logits[positions]
