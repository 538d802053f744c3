"""Drawing tokens on CPU: the algorithm of `drawing.draw`, one row at a time.

What it adds is exact pruning of the noise. Gumbel noise reaches t with probability
1 - exp(-exp(-t)) <= exp(-t), so a token can beat the noisy value b of the likeliest token only if its hash,
as a fraction of 2^32, is at most exp(z - b). That is a few vector instructions per token; logs are taken
of the survivors alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.primitives.memory import carray, floats, load, pointer, store
from executor_service.backends.torch_backend.cpu.primitives.vector_math import FLAGS, exp32

_SLACK = np.float32(1.0001)  # for the rounding of the bound
_STEP = np.float32(2.0**-24)
_ZERO = np.float32(0.0)


@njit(nogil=True)
def hash_token(low: np.uint32, high: np.uint32, token: int) -> np.uint32:
    """`executor_service.contract.noise.hash_tokens` of one id; low and high are the halves of the key."""
    x = np.uint32(np.uint32(np.uint32(token) * np.uint32(0x9E3779B1)) ^ low)
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) + high)
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@njit(nogil=True)
def _noise_of(low: np.uint32, high: np.uint32, token: int) -> np.float32:
    w = np.float32(hash_token(low, high, token)) * np.float32(2.0**-32)
    w = min(w + np.float32(2.0**-33), np.float32(1.0 - 2.0**-24))
    return np.float32(-np.log(-np.log1p(-w)))


@njit(nogil=True, fastmath=FLAGS)
def _scale(logits: NDArray[np.float32], temperature: np.float32, scaled: NDArray[np.float32]) -> np.float32:
    """scaled = logits / temperature; returns the largest."""
    highest = np.float32(-np.inf)
    for v in range(logits.shape[0]):
        z = logits[v] / temperature
        scaled[v] = z
        highest = max(highest, z)
    return highest


@njit(nogil=True, fastmath=FLAGS)
def _mass(scaled: NDArray[np.float32], highest: np.float32) -> np.float64:
    """The sum of exp(z - highest)."""
    total = np.float64(0.0)
    for v in range(scaled.shape[0]):
        total += np.float64(exp32(scaled[v] - highest))
    return total


@njit(nogil=True, fastmath=FLAGS)
def _mark(
    scaled: NDArray[np.float32], bound: np.float32, low: np.uint32, high: np.uint32, marks: NDArray[np.uint8]
) -> None:
    """Mark the tokens whose noisy value can reach `bound`."""
    for v in range(scaled.shape[0]):
        w = np.float32(np.int32(hash_token(low, high, v) >> np.uint32(8))) * _STEP  # rounded down
        marks[v] = w <= exp32(min(scaled[v] - bound, _ZERO)) * _SLACK


@njit(nogil=True, fastmath=FLAGS)
def _above(scaled: NDArray[np.float32], highest: np.float32, token: int) -> tuple[int, np.float64]:
    """Count and mass of the tokens that come before `token` in order of likelihood, then of id."""
    border, count, mass = scaled[token], 0, np.float64(0.0)
    for v in range(scaled.shape[0]):
        before = (scaled[v] > border) | ((scaled[v] == border) & (v < token))
        count += 1 if before else 0
        mass += np.float64(exp32(scaled[v] - highest)) if before else np.float64(0.0)
    return count, mass


@njit(nogil=True)
def _draw(
    scaled: NDArray[np.float32],
    highest: np.float32,
    low: np.uint32,
    high: np.uint32,
    top_k: int,
    mass: np.float64,
    min_p: np.float64,
    marks: NDArray[np.uint8],
) -> int:
    """The noisiest token of the kept prefix; `mass` is what the nucleus may hold before its last token."""
    vocabulary = scaled.shape[0]
    likeliest = 0
    while scaled[likeliest] < highest:
        likeliest += 1
    _mark(scaled, scaled[likeliest] + _noise_of(low, high, likeliest), low, high, marks)
    ids = np.nonzero(marks)[0]
    values = np.empty(ids.shape[0], np.float32)
    for i in range(ids.shape[0]):
        values[i] = scaled[ids[i]] + _noise_of(low, high, ids[i])
    limit_value, limit_id = np.float32(np.inf), vocabulary
    limited = False
    while True:
        best, chosen = np.float32(-np.inf), likeliest
        for i in range(ids.shape[0]):
            z = scaled[ids[i]]
            inside = not limited or z > limit_value or (z == limit_value and ids[i] < limit_id)
            if inside and values[i] > best:
                best, chosen = values[i], ids[i]
        if chosen == likeliest or (top_k >= vocabulary and mass == np.inf and min_p <= 0.0):
            return chosen
        count, before = _above(scaled, highest, chosen)
        share = np.float64(exp32(scaled[chosen] - highest))
        if count < top_k and before < mass and share >= min_p:
            return chosen
        limited, limit_value, limit_id = True, scaled[chosen], chosen


@njit(nogil=True)
def draw_chunk(arguments: int, row: int) -> None:
    """Draw one row's token.

    Arguments: logits fp32 [rows, vocabulary], temperatures fp32, keys uint64, top_k int64, top_p fp64, min_p
    fp64, totals fp64, tokens int64 (all [rows]), rows, vocabulary. `totals` is the mass that top_p is a share
    of, as exp(z - highest), where top-k leaves less than all tokens, 0 elsewhere; top_k is the vocabulary's
    size where it is off.
    """
    rows, vocabulary = load(arguments + 64), load(arguments + 72)
    logits = floats(load(arguments) + 4 * row * vocabulary, vocabulary)
    temperature = floats(load(arguments + 8), rows)[row]
    key = load(load(arguments + 16) + 8 * row)
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32((key >> 32) & 0xFFFFFFFF)
    top_k = load(load(arguments + 24) + 8 * row)
    top_p, min_p, total = (
        carray(pointer(load(arguments + 32)), (rows,), np.float64)[row],
        carray(pointer(load(arguments + 40)), (rows,), np.float64)[row],
        carray(pointer(load(arguments + 48)), (rows,), np.float64)[row],
    )
    scaled, marks = np.empty(vocabulary, np.float32), np.empty(vocabulary, np.uint8)
    highest = _scale(logits, temperature, scaled)
    mass = np.float64(np.inf)
    if top_p < 1.0:
        mass = top_p * (total if total > 0.0 else _mass(scaled, highest))
    token = _draw(scaled, highest, low, high, top_k, mass, min_p, marks)
    store(load(arguments + 56) + 8 * row, token)


@njit(nogil=True, fastmath=FLAGS)
def _highest(logits: NDArray[np.float32]) -> np.float32:
    top = np.float32(-np.inf)
    for v in range(logits.shape[0]):
        top = max(top, logits[v])
    return top


@njit(nogil=True)
def argmax_chunk(arguments: int, row: int) -> None:
    """The first of the largest logits of a row.

    Arguments: logits fp32 [rows, vocabulary], tokens int64 [rows], vocabulary.
    """
    vocabulary = load(arguments + 16)
    logits = floats(load(arguments) + 4 * row * vocabulary, vocabulary)
    top, token = _highest(logits), 0
    while token < vocabulary - 1 and logits[token] < top:
        token += 1
    store(load(arguments + 8) + 8 * row, token)
