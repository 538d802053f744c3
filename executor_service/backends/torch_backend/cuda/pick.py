"""Picking tokens on the device: what `sampler` does for rows without penalties, in two Triton kernels.

The first surveys the row in chunks, side by side: is it finite, and which token is the noisiest (at
temperature 0: the best). That is the token unless the row is filtered. The second, one program a row, then
does what `drawing.draw` describes: count and weigh what comes before the noisiest token, and where that is
too much look for the noisiest before it. Where top-p is a share of what top-k leaves, bounds close in on the
k-th likeliest token; nothing is sorted.

**The token is the one of `drawing.draw`** as far as its arithmetic goes: hash, division by the temperature,
order, ties and counts are the same to the bit, and no result depends on the row's neighbours or their number.
What may differ is the last bits of exp and log, which are the device's own (as between any two devices), and
those of sums: fp32 weights are summed in fp64 here as there, in another order. A token can differ where two
noisy values lie that close, or where the mass before a token equals that of the nucleus (or its weight min_p)
to within 1e-6 of it.

Cost: the survey reads 4 bytes x vocabulary of a row, and so does each pass over a filtered row: one for top-k
or min-p alone, two for top-p, three to five for both (20 more where k is in the thousands), and two for each
token that is not kept, of which there are ln(1 / kept share of the mass) on average. A row's survey has
vocabulary / CHUNK programs, its passes have one: at batch 1 they take what one multiprocessor needs to
compute an exp (or, where nothing was kept, noise) for every token, by count of its instructions some 20 us
(100 us with noise) for 151,936 tokens on an H100. Memory is not the limit: the row lies in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch import Launch, power_of_two

CHUNK = 4096  # tokens of one program of the survey
_SURVEY_TILE, _PICK_TILE = 1024, 4096  # tokens read at once
_SCALE, _HALF, _MOST = tl.constexpr(2.0**-32), tl.constexpr(2.0**-33), tl.constexpr(1.0 - 2.0**-24)
_LOWEST = tl.constexpr(-0x7F800001)  # _ordered(-inf)
# Views into larger tensors: their alignment says nothing, and may change from step to step.
_PLANNED = (
    "temperatures", "key_lows", "key_highs", "top_ks", "top_ps", "min_ps",
    "best_values", "best_tokens", "highest_logits", "finites", "out_tokens", "out_finite",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PickRows:
    """How to pick from each row of logits: contiguous device tensors, [rows] each, as precise as the proto.

    Rows of zeros are greedy, so padding may be anything or nothing: every bit pattern gives some token.
    """

    temperatures: torch.Tensor  # fp32; 0: greedy, nothing else is read; else at least sampler.MIN_TEMPERATURE
    key_lows: torch.Tensor  # int32, the low half of `noise.key`
    key_highs: torch.Tensor  # int32
    top_ks: torch.Tensor  # int32; 0 (or the vocabulary and above): off
    top_ps: torch.Tensor  # fp32, as the proto has it; 1: off
    min_ps: torch.Tensor  # fp32; 0: off


@triton.jit
def _noise(low, high, token):
    """`noise.gumbel` of each token, int32, fp32; low and high are the halves of the key, uint32."""
    x = (token.to(tl.uint32) * 0x9E3779B1) ^ low
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) + high
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    w = tl.minimum(x.to(tl.float32) * _SCALE + _HALF, _MOST)
    # log1p(-w) as `executor_service.contract.noise` computes it.
    u = 1.0 - w
    lost = 1.0 - u
    tiny = lost == 0
    minus_log1p = -tl.log(u) * tl.div_rn(w, tl.where(tiny, 1.0, lost))
    return -tl.log(tl.where(tiny, w, minus_log1p))


@triton.jit
def _scaled(logits, token, vocabulary, temperature):
    """logits / temperature of some tokens, fp32, rounded like the CPU's; -inf behind the vocabulary."""
    return tl.div_rn(tl.load(logits + token, mask=token < vocabulary, other=float("-inf")), temperature)


@triton.jit
def _first_best(values, tokens, vocabulary):
    """The largest value and the lowest of its tokens."""
    best = tl.max(values, 0)
    token = tl.min(tl.where(values == best, tokens, vocabulary), 0)
    return best, tl.minimum(token, vocabulary - 1)  # some token even where all is NaN


@triton.jit(do_not_specialize=_PLANNED)
def _survey_kernel(
    best_values, best_tokens, highest_logits, finites, logits, temperatures, key_lows, key_highs,
    vocabulary, stride, chunk: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the chunk's noisiest token, its highest logit and whether it is finite."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    low = tl.load(key_lows + row).to(tl.uint32, bitcast=True)
    high = tl.load(key_highs + row).to(tl.uint32, bitcast=True)
    source = logits + row.to(tl.int64) * stride
    lane, begin = tl.arange(0, tile), tl.program_id(1) * chunk
    values, tokens = tl.full([tile], float("-inf"), tl.float32), begin + lane
    highest, finite = values, tl.full([tile], 1, tl.int32)
    for first in range(begin, tl.minimum(begin + chunk, vocabulary), tile):
        token = first + lane
        live = token < vocabulary
        logit = tl.load(source + token, mask=live, other=float("-inf"))
        value = logit
        if temperature != 0:
            value = tl.div_rn(logit, temperature) + _noise(low, high, token)
        better = value > values
        values, tokens = tl.where(better, value, values), tl.where(better, token, tokens)
        highest = tl.maximum(highest, logit)
        finite = finite & ((tl.abs(logit) < float("inf")) | (token >= vocabulary)).to(tl.int32)
    best, chosen = _first_best(values, tokens, vocabulary)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_values + place, best)
    tl.store(best_tokens + place, chosen)
    tl.store(highest_logits + place, tl.max(highest, 0))
    tl.store(finites + place, tl.min(finite, 0))


@triton.jit
def _precedes(z, token, border, border_token):
    """Which tokens are likelier than the one at the border, or as likely with a lower id."""
    return (z > border) | ((z == border) & (token < border_token))


@triton.jit
def _weigh(
    logits, vocabulary, temperature, highest, border, border_token, tile: tl.constexpr
):  # fmt: skip
    """The tokens before the border: how many, their mass as exp(z - highest), and the least likely's z."""
    lane = tl.arange(0, tile)
    counts, masses = tl.zeros([tile], tl.int32), tl.zeros([tile], tl.float64)
    least = tl.full([tile], float("inf"), tl.float32)
    for first in range(0, vocabulary, tile):
        token = first + lane
        z = _scaled(logits, token, vocabulary, temperature)
        before = _precedes(z, token, border, border_token) & (token < vocabulary)
        counts += before.to(tl.int32)
        masses += tl.where(before, tl.exp(z - highest), 0.0).to(tl.float64)
        least = tl.where(before, tl.minimum(least, z), least)
    return tl.sum(counts, 0), tl.sum(masses, 0), tl.min(least, 0)


@triton.jit
def _noisiest(
    logits, vocabulary, temperature, low, high, border, border_token, tile: tl.constexpr
):  # fmt: skip
    """The noisiest of the tokens before the border."""
    lane = tl.arange(0, tile)
    values, tokens = tl.full([tile], float("-inf"), tl.float32), tl.full([tile], vocabulary, tl.int32)
    for first in range(0, vocabulary, tile):
        token = first + lane
        z = _scaled(logits, token, vocabulary, temperature)
        before = _precedes(z, token, border, border_token) & (token < vocabulary)
        if tl.max(before.to(tl.int32), 0) > 0:  # noise is dear, and the likely tokens are few
            value = tl.where(before, z + _noise(low, high, token), float("-inf"))
            better = value > values
            values, tokens = tl.where(better, value, values), tl.where(better, token, tokens)
    _, chosen = _first_best(values, tokens, vocabulary)
    return chosen


@triton.jit
def _ordered(z):
    """An int32 for each fp32, in the same order; its own inverse but for the type."""
    bits = z.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The fp32 of an `_ordered` int32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(lower, upper):
    return (lower & upper) + ((lower ^ upper) >> 1)  # their sum may not fit


@triton.jit
def _top_k_mass(logits, vocabulary, temperature, highest, k, tile: tl.constexpr):
    """The mass of the k likeliest tokens, 0 < k < vocabulary, as exp(z - highest).

    Bounds of the k-th's z close in on it: at least k tokens reach `lower`, fewer reach `upper`. The first
    lower bound is the k-th of the lanes' maxima, which mostly is the k-th of all or almost so.
    """
    lane = tl.arange(0, tile)
    maxima = tl.full([tile], float("-inf"), tl.float32)
    for first in range(0, vocabulary, tile):
        maxima = tl.maximum(maxima, _scaled(logits, first + lane, vocabulary, temperature))
    keys = _ordered(maxima)
    lower, upper = tl.full([], _LOWEST, tl.int32), _ordered(highest) + 1
    while lower + 1 < upper:
        middle = _middle(lower, upper)
        reached = tl.sum((keys >= middle).to(tl.int32), 0) >= k
        lower, upper = tl.where(reached, middle, lower), tl.where(reached, upper, middle)

    upper = _ordered(highest) + 1
    above, mass_above = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
    count, mass, least = _weigh(logits, vocabulary, temperature, highest, _value(lower), vocabulary, tile)
    lower = tl.maximum(lower, _ordered(least))
    turn = tl.full([], 0, tl.int32)
    while (count > k) & (lower + 1 < upper):
        # In turn: drop the least value (a tie at the border, one token too many); halve what is left.
        key = tl.where(turn % 2 == 0, lower + 1, _middle(lower, upper))
        turn += 1
        n, m, least = _weigh(logits, vocabulary, temperature, highest, _value(key), vocabulary, tile)
        if n >= k:
            lower, count, mass = tl.maximum(key, _ordered(least)), n, m
        else:
            upper, above, mass_above = key, n, m
    if count > k:  # of equal tokens at the border
        mass = mass_above + (k - above).to(tl.float64) * tl.exp(_value(lower) - highest).to(tl.float64)
    return mass


@triton.jit(do_not_specialize=_PLANNED)
def _pick_kernel(
    out_tokens, out_finite, best_values, best_tokens, highest_logits, finites, logits,
    temperatures, key_lows, key_highs, top_ks, top_ps, min_ps, vocabulary, stride,
    chunks: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Program (row): the noisiest of all chunks, then of the tokens that the filters keep."""
    row = tl.program_id(0)
    column = tl.arange(0, columns)
    place, live = row * chunks + column, column < chunks
    values = tl.load(best_values + place, mask=live, other=float("-inf"))
    tokens = tl.load(best_tokens + place, mask=live, other=vocabulary)
    _, chosen = _first_best(values, tokens, vocabulary)
    tl.store(out_finite + row, tl.min(tl.load(finites + place, mask=live, other=1), 0))
    temperature = tl.load(temperatures + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64)
    min_p = tl.load(min_ps + row).to(tl.float64)
    some = (top_k > 0) & (top_k < vocabulary)
    if (temperature != 0) & (some | (top_p < 1) | (min_p > 0)):
        k = tl.where(some, top_k, vocabulary)
        source = logits + row.to(tl.int64) * stride
        low = tl.load(key_lows + row).to(tl.uint32, bitcast=True)
        high = tl.load(key_highs + row).to(tl.uint32, bitcast=True)
        highest = tl.max(tl.load(highest_logits + place, mask=live, other=float("-inf")), 0)
        highest = tl.div_rn(highest, temperature)
        nucleus = tl.full([], float("inf"), tl.float64)
        if top_p < 1:
            if some:
                nucleus = top_p * _top_k_mass(source, vocabulary, temperature, highest, k, tile)
            else:
                _, total, _ = _weigh(
                    source, vocabulary, temperature, highest, float("-inf"), vocabulary, tile
                )  # fmt: skip
                nucleus = top_p * total
        z = tl.div_rn(tl.load(source + chosen), temperature)
        count, mass, _ = _weigh(source, vocabulary, temperature, highest, z, chosen, tile)
        weight = tl.exp(z - highest).to(tl.float64)
        while (count > 0) & ((count >= k) | (mass >= nucleus) | (weight < min_p)):
            chosen = _noisiest(source, vocabulary, temperature, low, high, z, chosen, tile)
            z = tl.div_rn(tl.load(source + chosen), temperature)
            count, mass, _ = _weigh(source, vocabulary, temperature, highest, z, chosen, tile)
            weight = tl.exp(z - highest).to(tl.float64)
    tl.store(out_tokens + row, chosen)


def pick(logits: torch.Tensor, rows: PickRows, out_tokens: torch.Tensor, out_finite: torch.Tensor) -> None:
    """The token of each row of logits, and whether all of the row's logits are finite (1) or not (0).

    logits fp32 [rows, vocabulary], contiguous tokens; out_tokens, out_finite int32 [rows], contiguous. Of
    a row with NaN or infinity the token is some id below the vocabulary's size; the right one, if there is
    nothing worse than some -inf, of masked tokens. Raises ValueError.

    All arguments live on the device, nothing is read back, and what is allocated follows from shapes: a CUDA
    graph may capture this, once a call of the same shapes outside of it has compiled both kernels.
    """
    for launch in pick_launches(logits, rows, out_tokens, out_finite):
        launch.run()


def pick_launches(
    logits: torch.Tensor, rows: PickRows, out_tokens: torch.Tensor, out_finite: torch.Tensor
) -> Iterator[Launch]:
    """What `pick` launches, one after the other."""
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError("logits have to be fp32 [rows, vocabulary] with contiguous tokens")
    count, vocabulary = logits.shape
    fp32, int32 = (rows.temperatures, rows.top_ps, rows.min_ps), (rows.key_lows, rows.key_highs, rows.top_ks)
    for dtype, fields in ((torch.float32, fp32), (torch.int32, (*int32, out_tokens, out_finite))):
        if any(x.dtype != dtype or x.shape != (count,) or not x.is_contiguous() for x in fields):
            raise ValueError(f"some parameter or result of {count} rows is not contiguous {dtype} [{count}]")
    chunks = -(-vocabulary // CHUNK)
    best_values, highest_logits = torch.empty(2, count, chunks, dtype=torch.float32, device=logits.device)
    best_tokens, finites = torch.empty(2, count, chunks, dtype=torch.int32, device=logits.device)
    survey = {
        "best_values": best_values, "best_tokens": best_tokens, "highest_logits": highest_logits,
        "finites": finites, "logits": logits, "temperatures": rows.temperatures, "key_lows": rows.key_lows,
        "key_highs": rows.key_highs, "vocabulary": vocabulary, "stride": logits.stride(0),
    }  # fmt: skip
    yield Launch(
        _survey_kernel, (count, chunks, 1), survey, {"chunk": CHUNK, "tile": _SURVEY_TILE}, warps=8, stages=1
    )
    yield Launch(
        _pick_kernel,
        (count, 1, 1),
        survey
        | {
            "out_tokens": out_tokens, "out_finite": out_finite, "top_ks": rows.top_ks,
            "top_ps": rows.top_ps, "min_ps": rows.min_ps,
        },
        {"chunks": chunks, "columns": power_of_two(chunks), "tile": _PICK_TILE},
        warps=32,
        stages=1,
    )  # fmt: skip
