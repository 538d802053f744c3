"""The sampler: from logits to tokens and logprobs, on the logits' device.

The order is `plan.Sampling`'s. All greedy positions are computed together, and so
are all drawn ones; the kernels draw (`drawing.draw`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.base import ForwardRow, RowOutput
from executor_service.backends.numpy_sampler import adjust_in_place
from executor_service.backends.torch_backend.ops.drawing import Filters
from executor_service.contract import noise as reference
from executor_service.contract.masks import Masks
from executor_service.contract.plan import MIN_TEMPERATURE, OutputMode, Sampling, TokenIds


class Picker(Protocol):
    """Picks tokens from logits; implemented by `kernels.Kernels`."""

    def exclude(self, logits: torch.Tensor, places: NDArray[np.int64], masks: Masks) -> None:
        """Set logits[places] to -inf where the masks do not allow the token, as `drawing.exclude`."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The lowest id among the largest logits of each row, int64 [rows]."""

    def log_sum_exp(self, logits: torch.Tensor) -> torch.Tensor:
        """Log of the sum of exponentials of each row, fp32 [rows]: a logit minus this is a logprob."""

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: NDArray[np.float32],
        keys: NDArray[np.uint64],
        filters: Filters,
    ) -> torch.Tensor:
        """One sampled token per row, int64 [rows], as `drawing.draw` defines it."""


@dataclass(frozen=True, slots=True)
class _Position:
    """One position to sample: `index` into the logits, `length` tokens seen before the new one."""

    index: int
    row: ForwardRow
    length: int
    mask: Masks | None


def is_plain(row: ForwardRow) -> bool:
    """Whether the row needs only tokens (or no output), without penalties, bias or logprobs; perhaps masked.

    A mask of stop ids is none of these: it gives way to other masks.
    """
    s = row.sampling
    return row.output == OutputMode.NONE or (
        row.output == OutputMode.SAMPLE
        and s.logprobs is None
        and not penalizes(s)
        and not s.logit_bias
        and not (s.stop_token_ids and s.min_tokens > 0)
    )


def is_greedy(row: ForwardRow) -> bool:
    """Whether the row needs only the argmax of its unmodified logits at each position."""
    greedy = row.output == OutputMode.SAMPLE and row.sampling.temperature == 0
    return greedy and is_plain(row) and row.masks is None


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Which rows have no NaN and no infinity, bool [rows]."""
    # A finite sum proves finite terms, and is cheaper than testing each; sums can overflow, hence the retest.
    finite = torch.isfinite(logits.sum(-1))
    return finite if bool(finite.all()) else torch.isfinite(logits).all(-1)


def sample(logits: torch.Tensor, rows: Sequence[ForwardRow], pick: Picker) -> list[RowOutput]:
    """The rows' outputs from the logits of all their output positions, fp32 [positions, vocabulary].

    A row with logits that are not finite has the output RowOutput(finite=False). Logits of rows with a mask,
    penalties or a bias are overwritten, unless logprobs are asked for.
    """
    ends = np.cumsum([row.outputs for row in rows])
    spans = [slice(int(end) - row.outputs, int(end)) for row, end in zip(rows, ends, strict=True)]
    good = finite_rows(logits).cpu().numpy()
    positions = [
        _Position(
            i,
            row,
            row.start + len(row.tokens) - span.stop + i + 1,
            None if row.masks is None else row.masks[i - span.start],
        )
        for row, span in zip(rows, spans, strict=True)
        for i in range(span.start, span.stop)
        if row.output == OutputMode.SAMPLE and good[span].all()
    ]
    tokens = np.zeros(len(logits), np.int32)
    if positions:
        tokens[[p.index for p in positions]] = _tokens(logits, positions, pick)
    return [
        _output(row, logits[span], tokens[span], pick) if good[span].all() else RowOutput(finite=False)
        for row, span in zip(rows, spans, strict=True)
    ]


def ranked(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row and their ids, [n, k]; of equal ones the lowest ids, in order."""
    top, ids = values.topk(k)
    # topk breaks ties arbitrarily: order ties by id, and where a tie straddles the k-th place, sort the row.
    ids, order = ids.sort(-1)
    top, order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    border = top[:, -1:]
    torn = (values == border).sum(-1) > (top == border).sum(-1)
    for row in torn.nonzero()[:, 0].tolist():
        whole, whole_ids = values[row].sort(dim=-1, descending=True, stable=True)
        top[row], ids[row] = whole[:k], whole_ids[:k]
    return top, ids


def _output(row: ForwardRow, logits: torch.Tensor, tokens: TokenIds, pick: Picker) -> RowOutput:
    """One row's output from its logits, which are finite, and the tokens sampled from them."""
    if row.outputs == 0 or row.output == OutputMode.NONE:
        return RowOutput()
    if row.output == OutputMode.FULL:
        return RowOutput(logits=logits.cpu().numpy().copy())
    if row.output == OutputMode.TOP_K:
        return _with_top(RowOutput(), logits, row.top_k, pick)
    result = RowOutput(tokens=tokens)
    if row.sampling.logprobs is not None:
        chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)[:, None]
        logprobs = logits.gather(-1, chosen)[:, 0] - pick.log_sum_exp(logits)
        result.logprobs = logprobs.cpu().numpy()
        if row.sampling.logprobs > 0:
            _with_top(result, logits, row.sampling.logprobs, pick)
    return result


def _with_top(result: RowOutput, logits: torch.Tensor, k: int, pick: Picker) -> RowOutput:
    top, ids = ranked(logits, min(k, logits.shape[-1]))
    result.top_ids = ids.to(torch.int32).cpu().numpy()
    result.top_logprobs = (top - pick.log_sum_exp(logits)[:, None]).cpu().numpy()
    return result


def _tokens(logits: torch.Tensor, positions: Sequence[_Position], pick: Picker) -> TokenIds:
    """The token of each position, int32 [positions]."""
    logits = _adjusted(_masked(logits, positions, pick), positions)
    tokens = np.zeros(len(positions), np.int32)
    greedy = [i for i, p in enumerate(positions) if p.row.sampling.temperature == 0]
    drawn = [i for i, p in enumerate(positions) if p.row.sampling.temperature != 0]
    if greedy:
        tokens[greedy] = pick.argmax(part_of(logits, [positions[i].index for i in greedy])).cpu().numpy()
    if drawn:
        members = [positions[i] for i in drawn]
        tokens[drawn] = _drawn(part_of(logits, [p.index for p in members]), members, pick).cpu().numpy()
    return tokens


def _masked(logits: torch.Tensor, positions: Sequence[_Position], pick: Picker) -> torch.Tensor:
    """The logits with -inf for what masks do not allow; a copy where logprobs need the raw ones.

    Penalties and bias leave -inf as it is, so that this may come before them.
    """
    places = [p.index for p in positions if p.mask is not None]
    if not places:
        return logits
    if any(p.mask is not None and p.row.sampling.logprobs is not None for p in positions):
        logits = logits.clone()
    masks = np.stack([p.mask for p in positions if p.mask is not None])
    pick.exclude(logits, np.array(places, np.int64), masks)
    return logits


def part_of(logits: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Some rows of the logits; no copy if these are all rows."""
    if indices == list(range(len(logits))):
        return logits  # the usual step: no copy
    return logits[torch.tensor(indices, device=logits.device)]


def _drawn(logits: torch.Tensor, positions: Sequence[_Position], pick: Picker) -> torch.Tensor:
    vocabulary = logits.shape[-1]
    samplings = [p.row.sampling for p in positions]
    temperatures = np.array([max(s.temperature, MIN_TEMPERATURE) for s in samplings], np.float32)
    filters = Filters(
        top_k=np.array(
            [min(s.top_k, vocabulary) if s.top_k > 0 else vocabulary for s in samplings], np.int64
        ),
        top_p=np.array([s.top_p for s in samplings], np.float64),
        min_p=np.array([min(s.min_p, 1.0) for s in samplings], np.float64),
        totals=np.array([_top_k_mass(logits[i], s) for i, s in enumerate(samplings)], np.float64),
    )
    keys = np.array([reference.key(p.row.sampling.seed, p.length) for p in positions], np.uint64)
    return pick.draw(logits, temperatures, keys, filters)


def _top_k_mass(logits: torch.Tensor, s: Sampling) -> float:
    """The mass of the k most likely tokens as exp(z - highest) where the nucleus is a share of it, or 0."""
    if not 0 < s.top_k < len(logits) or s.top_p >= 1:
        return 0.0
    top = logits.topk(s.top_k).values / max(s.temperature, MIN_TEMPERATURE)
    return float((top - top[0]).exp().sum(dtype=torch.float64))


def _adjusted(logits: torch.Tensor, positions: Sequence[_Position]) -> torch.Tensor:
    """The logits after penalties, bias and the mask of stop ids; a copy where logprobs need the raw ones."""
    changed = [p for p in positions if _adjusts(p)]
    if not changed:
        return logits
    if any(p.row.sampling.logprobs is not None for p in changed):
        logits = logits.clone()
    for p in changed:
        there = logits[p.index].cpu()  # on the CPU the memory itself
        adjust_in_place(there.numpy(), p.row.history[: p.length], p.row.prompt_length, p.row.sampling)
        if logits.device.type != "cpu":
            logits[p.index] = there.to(logits.device)
    return logits


def _adjusts(p: _Position) -> bool:
    s = p.row.sampling
    return penalizes(s) or bool(s.logit_bias) or masks_stops(p.row, p.length)


def penalizes(s: Sampling) -> bool:
    """Whether tokens that are in the history have other logits."""
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def masks_stops(row: ForwardRow, length: int) -> bool:
    """Whether the token after the first `length` ones of the row's sequence may not be a stop id."""
    s = row.sampling
    return bool(s.stop_token_ids) and max(length - row.prompt_length, 0) < s.min_tokens
