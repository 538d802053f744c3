"""A row's tokens in order of likelihood, then of id: what comes before one of them, without sorting.

z is a token's logit divided by the temperature. A *border* is a place in the order, given as z and token id;
the tokens before it are those that are likelier, or as likely with a lower id. Masses are sums of exp(z -
highest z). Each function is called by one program for one row, and reads the row's logits, fp32 [vocabulary],
in tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-0x7F800001)  # _ordered(-inf)


@triton.jit
def scaled(logits, token, vocabulary, temperature):
    """z of some tokens, fp32, rounded as on CPU; -inf for ids beyond the vocabulary."""
    return tl.div_rn(tl.load(logits + token, mask=token < vocabulary, other=float("-inf")), temperature)


@triton.jit
def first_largest(values, tokens, vocabulary):
    """The largest of some values, and the lowest of the token ids that have it."""
    best = tl.max(values, 0)
    token = tl.min(tl.where(values == best, tokens, vocabulary), 0)
    return best, tl.minimum(token, vocabulary - 1)  # an id of the vocabulary even where all values are NaN


@triton.jit
def _precedes(z, token, border, border_token):
    """Which tokens, with their z, come before the border."""
    return (z > border) | ((z == border) & (token < border_token))


@triton.jit
def weigh(
    logits, vocabulary, temperature, highest, border, border_token, tile: tl.constexpr
):  # fmt: skip
    """Of the tokens before the border: their number, int32, their mass, fp64, and their lowest z, fp32."""
    lane = tl.arange(0, tile)
    counts, masses = tl.zeros([tile], tl.int32), tl.zeros([tile], tl.float64)
    lowest = tl.full([tile], float("inf"), tl.float32)
    for first in range(0, vocabulary, tile):
        token = first + lane
        z = scaled(logits, token, vocabulary, temperature)
        before = _precedes(z, token, border, border_token) & (token < vocabulary)
        counts += before.to(tl.int32)
        masses += tl.where(before, tl.exp(z - highest), 0.0).to(tl.float64)
        lowest = tl.where(before, tl.minimum(lowest, z), lowest)
    return tl.sum(counts, 0), tl.sum(masses, 0), tl.min(lowest, 0)


@triton.jit
def noisiest(
    logits, vocabulary, temperature, low, high, border, border_token, tile: tl.constexpr
):  # fmt: skip
    """The token before the border whose z with noise is largest."""
    lane = tl.arange(0, tile)
    values, tokens = tl.full([tile], float("-inf"), tl.float32), tl.full([tile], vocabulary, tl.int32)
    for first in range(0, vocabulary, tile):
        token = first + lane
        z = scaled(logits, token, vocabulary, temperature)
        before = _precedes(z, token, border, border_token) & (token < vocabulary)
        if tl.max(before.to(tl.int32), 0) > 0:  # noise is expensive, and likely tokens are few
            value = tl.where(before, z + gumbel_noise(low, high, token), float("-inf"))
            better = value > values
            values, tokens = tl.where(better, value, values), tl.where(better, token, tokens)
    _, chosen = first_largest(values, tokens, vocabulary)
    return chosen


@triton.jit
def _ordered(z):
    """The int32 of an fp32 such that int32s compare as their fp32s do."""
    bits = z.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The inverse of `_ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(lower, upper):
    return (lower & upper) + ((lower ^ upper) >> 1)  # the mean, rounded down; their sum could overflow


@triton.jit
def top_k_mass(logits, vocabulary, temperature, highest, k, tile: tl.constexpr):
    """The mass of the k likeliest tokens, fp64; 0 < k < vocabulary.

    Bounds close in on the k-th largest z: at least k tokens reach `lower`, fewer than k reach `upper`. The
    first lower bound is the k-th largest of the lanes' maxima, mostly the k-th largest of all or close to it.
    """
    lane = tl.arange(0, tile)
    maxima = tl.full([tile], float("-inf"), tl.float32)
    for first in range(0, vocabulary, tile):
        maxima = tl.maximum(maxima, scaled(logits, first + lane, vocabulary, temperature))
    keys = _ordered(maxima)
    lower, upper = tl.full([], _LOWEST, tl.int32), _ordered(highest) + 1
    while lower + 1 < upper:
        middle = _middle(lower, upper)
        reached = tl.sum((keys >= middle).to(tl.int32), 0) >= k
        lower, upper = tl.where(reached, middle, lower), tl.where(reached, upper, middle)

    upper = _ordered(highest) + 1
    above, mass_above = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
    count, mass, lowest = weigh(logits, vocabulary, temperature, highest, _value(lower), vocabulary, tile)
    lower = tl.maximum(lower, _ordered(lowest))
    turn = tl.full([], 0, tl.int32)
    while (count > k) & (lower + 1 < upper):
        # In turn: exclude the lowest z (enough for a tie, or one token too many), and halve the interval.
        key = tl.where(turn % 2 == 0, lower + 1, _middle(lower, upper))
        turn += 1
        n, m, lowest = weigh(logits, vocabulary, temperature, highest, _value(key), vocabulary, tile)
        if n >= k:
            lower, count, mass = tl.maximum(key, _ordered(lowest)), n, m
        else:
            upper, above, mass_above = key, n, m
    if count > k:  # some of the tokens whose z is `lower` are left out
        mass = mass_above + (k - above).to(tl.float64) * tl.exp(_value(lower) - highest).to(tl.float64)
    return mass


_SCALE, _HALF, _MAX = tl.constexpr(2.0**-32), tl.constexpr(2.0**-33), tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def gumbel_noise(low, high, token):
    """Gumbel noise, fp32, of token ids, int32, under one key whose halves are low and high, uint32."""
    x = (token.to(tl.uint32) * 0x9E3779B1) ^ low
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) + high
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    w = tl.minimum(x.to(tl.float32) * _SCALE + _HALF, _MAX)
    # log1p(-w) as `executor_service.contract.noise` computes it.
    u = 1.0 - w
    lost = 1.0 - u
    tiny = lost == 0
    minus_log1p = -tl.log(u) * tl.div_rn(w, tl.where(tiny, 1.0, lost))
    return -tl.log(tl.where(tiny, w, minus_log1p))
