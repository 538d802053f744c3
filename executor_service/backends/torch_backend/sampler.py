"""The sampler: from logits to tokens and logprobs, on the logits' device.

The order is `plan.Sampling`'s. Positions are split into three classes, each computed at once: greedy, plain
noise, and filtered (top-k, top-p, min-p). Every filter keeps a prefix of the tokens in order of likelihood, so
a filtered position needs only its most likely tokens: 256 of them, or eight times as many until they
contain the prefix. Nothing sorts a vocabulary unless a nucleus is that wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from executor_service import noise as reference
from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.torch_backend import noise
from executor_service.plan import OutputMode, Sampling

_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class _Position:
    """One position to sample: `index` into the logits, `length` tokens seen before the new one."""

    index: int
    row: ForwardRow
    length: int


def sample(logits: torch.Tensor, rows: Sequence[ForwardRow]) -> list[RowOutput]:
    """The rows' outputs from the logits of their output positions, fp32 [sum of outputs, vocabulary]."""
    ends = np.cumsum([row.outputs for row in rows])
    spans = [slice(int(end) - row.outputs, int(end)) for row, end in zip(rows, ends, strict=True)]
    # A sum is finite unless a term is not, or it overflows: cheaper than asking each of them.
    finite = torch.isfinite(logits.sum(-1))
    if not bool(finite.all()):
        finite = torch.isfinite(logits).all(-1)
    good = finite.cpu().numpy()
    positions = [
        _Position(i, row, row.start + len(row.tokens) - span.stop + i + 1)
        for row, span in zip(rows, spans, strict=True)
        for i in range(span.start, span.stop)
        if row.output == OutputMode.SAMPLE and good[span].all()
    ]
    tokens = np.zeros(len(logits), np.int32)
    if positions:
        tokens[[p.index for p in positions]] = _tokens(logits, positions)
    return [
        _output(row, logits[span], tokens[span]) if good[span].all() else RowOutput(finite=False)
        for row, span in zip(rows, spans, strict=True)
    ]


def ranked(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row and their ids, [n, k]; of equal ones the lowest ids, in their order."""
    top, ids = values.topk(k)
    # topk breaks ties as it likes: order them, and where a tie crosses the border, take the lowest ids.
    ids, order = ids.sort(-1)
    top, order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    border = top[:, -1:]
    torn = (values == border).sum(-1) > (top == border).sum(-1)
    for row in torn.nonzero()[:, 0].tolist():
        whole, whole_ids = values[row].sort(dim=-1, descending=True, stable=True)
        top[row], ids[row] = whole[:k], whole_ids[:k]
    return top, ids


def _output(row: ForwardRow, logits: torch.Tensor, tokens: np.ndarray) -> RowOutput:
    if row.outputs == 0 or row.output == OutputMode.NONE:
        return RowOutput()
    if row.output == OutputMode.FULL:
        return RowOutput(logits=logits.cpu().numpy().copy())
    result = RowOutput()
    k = row.top_k
    total = logits.logsumexp(-1, keepdim=True) if row.output == OutputMode.TOP_K or row.sampling.logprobs is not None else None
    if row.output == OutputMode.SAMPLE:
        result.tokens = tokens
        if row.sampling.logprobs is None:
            return result
        k = row.sampling.logprobs
        chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)
        result.logprobs = (logits.gather(-1, chosen[:, None]) - total)[:, 0].cpu().numpy()
    if k > 0:
        top, ids = ranked(logits, min(k, logits.shape[-1]))
        result.top_ids = ids.to(torch.int32).cpu().numpy()
        result.top_logprobs = (top - total).cpu().numpy()
    return result


def _tokens(logits: torch.Tensor, positions: Sequence[_Position]) -> np.ndarray:
    """The token of each position, int32 [positions]."""
    logits = _adjusted(logits, positions)
    tokens = np.zeros(len(positions), np.int32)
    classes: dict[str, list[int]] = {}
    for i, position in enumerate(positions):
        classes.setdefault(_class_of(position.row.sampling), []).append(i)
    for name, members in classes.items():
        chosen = [positions[i] for i in members]
        part = _part(logits, [p.index for p in chosen])
        picked = {"greedy": _greedy, "noise": _noisy, "filtered": _filtered}[name](part, chosen)
        tokens[members] = picked.to(torch.int32).cpu().numpy()
    return tokens


def _class_of(s: Sampling) -> str:
    if s.temperature == 0:
        return "greedy"
    return "filtered" if s.top_k > 0 or s.top_p < 1 or s.min_p > 0 else "noise"


def _part(logits: torch.Tensor, indices: list[int]) -> torch.Tensor:
    if indices == list(range(len(logits))):
        return logits  # the usual step: no copy
    return logits[torch.tensor(indices, device=logits.device)]


def _greedy(logits: torch.Tensor, _positions: Sequence[_Position]) -> torch.Tensor:
    return logits.argmax(-1)


def _noisy(logits: torch.Tensor, positions: Sequence[_Position]) -> torch.Tensor:
    ids = torch.arange(logits.shape[-1], device=logits.device)
    scaled = logits / _column(logits, [p.row.sampling.temperature for p in positions])
    return (scaled + noise.gumbel(_keys(logits, positions), ids[None, :])).argmax(-1)


def _filtered(logits: torch.Tensor, positions: Sequence[_Position]) -> torch.Tensor:
    vocabulary = logits.shape[-1]
    samplings = [p.row.sampling for p in positions]
    scaled = logits / _column(logits, [s.temperature for s in samplings])
    highest = scaled.amax(-1, keepdim=True)
    mass = (scaled - highest).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    top_k = _column(logits, [s.top_k if s.top_k > 0 else vocabulary for s in samplings], torch.int64)
    top_p = _column(logits, [s.top_p for s in samplings], torch.float64)
    min_p = _column(logits, [s.min_p for s in samplings], torch.float64)
    keys = _keys(logits, positions)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    open_rows = torch.arange(len(logits), device=logits.device)
    count = min(_CANDIDATES, vocabulary)
    while True:
        rows = scaled if len(open_rows) == len(scaled) else scaled[open_rows]
        top, ids = ranked(rows, count)
        weights = (top.double() - highest[open_rows]).exp()
        sums = weights.cumsum(-1)
        k = top_k[open_rows]
        # What the nucleus is a share of: all tokens, or those that top-k left.
        share = torch.where(k < vocabulary, sums.gather(-1, k.clamp(max=count) - 1), mass[open_rows])
        before = sums - weights
        kept = torch.arange(count, device=logits.device)[None, :] < k
        kept &= (before < top_p[open_rows] * share) | (top_p[open_rows] >= 1)
        kept &= weights >= min_p[open_rows]
        kept[:, 0] = True
        done = ~kept[:, -1] | (count == vocabulary) | ((k <= count)[:, 0])
        noisy = torch.where(kept, top + noise.gumbel(keys[open_rows], ids), -torch.inf)
        best = noisy == noisy.amax(-1, keepdim=True)
        picked = torch.where(best, ids, vocabulary).amin(-1)
        tokens[open_rows[done]] = picked[done]
        open_rows = open_rows[~done]
        if len(open_rows) == 0:
            return tokens
        count = min(count * 8, vocabulary)


def _column(like: torch.Tensor, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def _keys(like: torch.Tensor, positions: Sequence[_Position]) -> torch.Tensor:
    keys = np.array([reference.key(p.row.sampling.seed, p.length) for p in positions], np.uint64)
    return torch.from_numpy(keys.view(np.int64)).to(like.device)[:, None]


def _adjusted(logits: torch.Tensor, positions: Sequence[_Position]) -> torch.Tensor:
    """The logits after penalties, bias and the mask of stop ids; a copy where anything changes."""
    changed = [p for p in positions if _adjusts(p)]
    if not changed:
        return logits
    logits = logits.clone()
    for p in changed:
        _adjust(logits[p.index], p)
    return logits


def _adjusts(p: _Position) -> bool:
    s = p.row.sampling
    penalties = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
    return penalties or bool(s.logit_bias) or _masks_stops(p)


def _masks_stops(p: _Position) -> bool:
    s = p.row.sampling
    return bool(s.stop_token_ids) and p.length - p.row.prompt_length < s.min_tokens


def _adjust(logits: torch.Tensor, p: _Position) -> None:
    s, device = p.row.sampling, logits.device

    def ids_of(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    if s.repetition_penalty != 1:
        seen = ids_of(np.unique(p.row.history[: p.length]))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if s.presence_penalty != 0 or s.frequency_penalty != 0:
        output, counts = np.unique(p.row.history[p.row.prompt_length : p.length], return_counts=True)
        weights = torch.from_numpy(counts.astype(np.float32)).to(device)
        logits[ids_of(output)] -= s.presence_penalty + s.frequency_penalty * weights
    if s.logit_bias:
        bias = torch.tensor([value for _, value in s.logit_bias], device=device)
        logits.index_add_(0, torch.tensor([i for i, _ in s.logit_bias], device=device), bias)
    if _masks_stops(p):
        logits[list(s.stop_token_ids)] = -torch.inf
