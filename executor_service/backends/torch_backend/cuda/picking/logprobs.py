"""Logprobs on the device, in three Triton kernels and a `topk`: of a given token, and of the likeliest.

The first kernel surveys each row of logits in chunks, side by side, for its largest logit, its sum of
exponentials, and whether it is finite; the second joins the chunks. The third puts the result of `topk` in
order, since `topk` breaks ties arbitrarily: of equal logits the lowest ids come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Arguments, Launch, power_of_two

_CHUNK, _TILE = 4096, 1024  # tokens of a program of the survey; tokens read at once
_MIN_COLUMNS = 32  # of `_rank_kernel`, so that it is compiled once for all usual numbers of tokens
_VIEWS = (
    "floats", "ints", "highs", "sums", "finites", "norms", "known", "places", "picks", "top_values",
    "top_ids", "width", "k", "logits",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measures:
    """Logprobs of the raw logits of some positions."""

    packed: torch.Tensor  # int32 [2, positions, 1 + k], with the properties here as its halves

    @classmethod
    def empty(cls, positions: int, k: int, device: torch.device) -> Measures:
        """Room for `k` tokens of each position beside the chosen one."""
        return cls(torch.empty(2, positions, 1 + k, dtype=torch.int32, device=device))

    @property
    def floats(self) -> torch.Tensor:
        """Fp32 [positions, 1 + k]: the logprob of the chosen token, and those of the likeliest ones."""
        return self.packed[0].view(torch.float32)

    @property
    def ints(self) -> torch.Tensor:
        """Int32 [positions, 1 + k]: whether all logits are finite, and the likeliest tokens."""
        return self.packed[1]


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The token of each position whose logprob is asked for; int32 [positions] each."""

    known: torch.Tensor  # the token, or -1: the one that was picked
    places: torch.Tensor  # where it is among the picks
    picks: torch.Tensor  # [outputs]: the tokens that the step picked


@triton.jit(do_not_specialize=_VIEWS)
def _survey_kernel(highs, sums, finites, logits, vocabulary, stride, chunk: tl.constexpr, tile: tl.constexpr):
    """Program (position, chunk): the chunk's largest logit, its sum of exp(logit - largest), if finite."""
    begin_kernel()
    position = tl.program_id(0)
    source = logits + position.to(tl.int64) * stride
    lane, begin = tl.arange(0, tile), tl.program_id(1) * chunk
    high, finite = tl.full([tile], float("-inf"), tl.float32), tl.full([tile], 1, tl.int32)
    for first in range(begin, tl.minimum(begin + chunk, vocabulary), tile):
        token = first + lane
        logit = tl.load(source + token, mask=token < vocabulary, other=float("-inf"))
        high = tl.maximum(high, logit)
        finite = finite & ((tl.abs(logit) < float("inf")) | (token >= vocabulary)).to(tl.int32)
    highest = tl.max(high, 0)
    total = tl.zeros([tile], tl.float32)
    for first in range(begin, tl.minimum(begin + chunk, vocabulary), tile):
        token = first + lane
        logit = tl.load(source + token, mask=token < vocabulary, other=float("-inf"))
        total += tl.exp(logit - highest)
    place = position * tl.num_programs(1) + tl.program_id(1)
    tl.store(highs + place, highest)
    tl.store(sums + place, tl.sum(total, 0))
    tl.store(finites + place, tl.min(finite, 0))


@triton.jit(do_not_specialize=_VIEWS)
def _norm_kernel(
    floats, ints, norms, highs, sums, finites, logits, known, places, picks, vocabulary, stride, width,
    chunks: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Program (position): the log of the sum of exponentials, and the logprob of the chosen token."""
    begin_kernel()
    position, column = tl.program_id(0), tl.arange(0, columns)
    place, live = position * chunks + column, column < chunks
    high = tl.load(highs + place, mask=live, other=float("-inf"))
    highest = tl.max(high, 0)
    total = tl.sum(tl.load(sums + place, mask=live, other=0.0) * tl.exp(high - highest), 0)
    norm = highest + tl.log(total)
    token = tl.load(known + position)
    if token < 0:
        token = tl.load(picks + tl.load(places + position))
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
    logit = tl.load(logits + position.to(tl.int64) * stride + token)
    tl.store(norms + position, norm)
    tl.store(floats + position * width, logit - norm)
    tl.store(ints + position * width, tl.min(tl.load(finites + place, mask=live, other=1), 0))


@triton.jit(do_not_specialize=_VIEWS)
def _rank_kernel(
    floats, ints, norms, top_values, top_ids, logits, vocabulary, stride, width, k,
    columns: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Program (position): its k largest logits as logprobs, and their tokens; of equal ones the lowest."""
    begin_kernel()
    position, column = tl.program_id(0), tl.arange(0, columns)
    live = column < k
    value = tl.load(top_values + position * k + column, mask=live, other=float("inf"))
    token = tl.load(top_ids + position * k + column, mask=live, other=0).to(tl.int32)
    norm = tl.load(norms + position)
    floats += position * width + 1
    ints += position * width + 1
    # Those above the k-th are certain. A certain one's place is the number of those that come before it.
    border = tl.min(value, 0)
    certain = live & (value > border)
    before = (value[None, :] > value[:, None]) | (
        (value[None, :] == value[:, None]) & (token[None, :] < token[:, None])
    )
    place = tl.sum((before & certain[None, :]).to(tl.int32), 1)
    tl.store(floats + place, value - norm, mask=certain & (place < k))
    tl.store(ints + place, token, mask=certain & (place < k))
    # The other places are for the first tokens with the k-th largest logit.
    source, lane = logits + position.to(tl.int64) * stride, tl.arange(0, tile)
    filled, first = tl.sum(certain.to(tl.int32), 0), 0
    while (filled < k) & (first < vocabulary):
        other = first + lane
        logit = tl.load(source + other, mask=other < vocabulary, other=float("-inf"))
        same = ((logit == border) & (other < vocabulary)).to(tl.int32)
        next_place = filled + tl.cumsum(same, 0) - 1
        tl.store(floats + next_place, logit - norm, mask=(same > 0) & (next_place < k))
        tl.store(ints + next_place, other, mask=(same > 0) & (next_place < k))
        filled += tl.sum(same, 0)
        first += tile


def measure(logits: torch.Tensor, chosen: ChosenTokens, measures: Measures) -> None:
    """Measure logits, fp32 [positions, vocabulary] with contiguous tokens. Nothing is read back.

    Results of a position whose logits are not finite mean nothing.
    """
    k = measures.ints.shape[1] - 1
    top = logits.topk(k) if k else None
    for launch in measure_launches(logits, chosen, measures, top):
        launch.run()


def measure_launches(
    logits: torch.Tensor,
    chosen: ChosenTokens,
    measures: Measures,
    top: tuple[torch.Tensor, torch.Tensor] | None,
) -> Iterator[Launch]:
    """The launches of `measure`; `top`: the k largest logits of each position and their tokens, if any."""
    positions, vocabulary = logits.shape
    chunks = -(-vocabulary // _CHUNK)
    highs, sums = torch.empty(2, positions, chunks, dtype=torch.float32, device=logits.device)
    finites = torch.empty(positions, chunks, dtype=torch.int32, device=logits.device)
    norms = torch.empty(positions, dtype=torch.float32, device=logits.device)
    survey: Arguments = {
        "highs": highs, "sums": sums, "finites": finites, "logits": logits, "vocabulary": vocabulary,
        "stride": logits.stride(0),
    }  # fmt: skip
    yield Launch(
        _survey_kernel, (positions, chunks, 1), survey, {"chunk": _CHUNK, "tile": _TILE}, warps=8, stages=1
    )
    results: Arguments = {
        "floats": measures.floats, "ints": measures.ints, "norms": norms, "logits": logits,
        "vocabulary": vocabulary, "stride": logits.stride(0), "width": measures.ints.shape[1],
    }  # fmt: skip
    yield Launch(
        _norm_kernel,
        (positions, 1, 1),
        survey | results | {"known": chosen.known, "places": chosen.places, "picks": chosen.picks},
        {"chunks": chunks, "columns": power_of_two(chunks)},
        warps=4,
        stages=1,
    )
    if top is not None:
        values, ids = top
        k = values.shape[1]
        yield Launch(
            _rank_kernel,
            (positions, 1, 1),
            results | {"top_values": values, "top_ids": ids, "k": k},
            {"columns": max(_MIN_COLUMNS, power_of_two(k)), "tile": _TILE},
            warps=4,
            stages=1,
        )
