"""Masks, and drawing tokens on CPU: the algorithm of `drawing.draw`, one row at a time.

Drawing also prunes, without changing the result. Gumbel noise exceeds t with probability 1 - exp(-exp(-t)) <=
exp(-t), so a token with z can exceed b, the value with noise of the likeliest token, only if its hash, as a
fraction of 2^32, is at most exp(z - b). That takes a few vector instructions per token; logarithms are
computed only for the tokens that pass.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.primitives.kernel import Kernel
from executor_service.backends.torch_backend.cpu.primitives.memory import carray, doubles, floats, pointer
from executor_service.backends.torch_backend.cpu.primitives.records import Address, reader
from executor_service.backends.torch_backend.cpu.primitives.vector_math import FLAGS, exp32, largest

_SLACK = np.float32(1.0001)  # for the rounding of the bound
_STEP = np.float32(2.0**-24)
_ZERO = np.float32(0.0)


class DrawTokens(NamedTuple):
    """Draw a token for each row. A chunk is a row."""

    rows: int
    vocabulary: int
    logits: Address  # fp32 [rows, vocabulary]
    temperatures: Address  # fp32 [rows], above 0
    keys: Address  # uint64 [rows], of the noise
    top_k: Address  # int64 [rows]; the vocabulary's size where it is off
    top_p: Address  # fp64 [rows]
    min_p: Address  # fp64 [rows]
    totals: Address  # fp64 [rows]: with top_k, the sum of exp(z - highest) that top_p is a share of; else 0
    tokens: Address  # int64 [rows]: the result


class ExcludeTokens(NamedTuple):
    """Set the logits of what masks do not allow to -inf, in place. A chunk is a mask."""

    masks: int  # how many
    vocabulary: int
    logits: Address  # fp32 [any number, vocabulary]
    places: Address  # int64 [masks]: the row of logits that each mask is for
    words: Address  # uint32 [masks, width], as in `contract.masks`
    width: int  # words of a mask, at least ceil(vocabulary / 32)


class TakeLargest(NamedTuple):
    """The first of the largest logits of each row. A chunk is a row."""

    rows: int
    vocabulary: int
    logits: Address  # fp32 [rows, vocabulary]
    tokens: Address  # int64 [rows]: the result


_read_draw, _read_argmax = reader(DrawTokens), reader(TakeLargest)
_read_exclude = reader(ExcludeTokens)


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
def exponential_sum(scaled: NDArray[np.float32], top: np.float32) -> np.float64:
    """The sum of exp(z - top)."""
    total = np.float64(0.0)
    for v in range(scaled.shape[0]):
        total += np.float64(exp32(scaled[v] - top))
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
def _count_draw_chunks(record: int) -> int:
    return _read_draw(record).rows


@njit(nogil=True)
def _draw_chunk(record: int, row: int) -> None:
    call = _read_draw(record)
    rows, vocabulary = call.rows, call.vocabulary
    logits = floats(call.logits + 4 * row * vocabulary, vocabulary)
    temperature = floats(call.temperatures, rows)[row]
    key = carray(pointer(call.keys), (rows,), np.uint64)[row]
    low, high = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    top_k = carray(pointer(call.top_k), (rows,), np.int64)[row]
    top_p, min_p = doubles(call.top_p, rows)[row], doubles(call.min_p, rows)[row]
    total = doubles(call.totals, rows)[row]
    scaled, marks = np.empty(vocabulary, np.float32), np.empty(vocabulary, np.uint8)
    top = _scale(logits, temperature, scaled)
    mass = np.float64(np.inf)
    if top_p < 1.0:
        mass = top_p * (total if total > 0.0 else exponential_sum(scaled, top))
    token = _draw(scaled, top, low, high, top_k, mass, min_p, marks)
    carray(pointer(call.tokens), (rows,), np.int64)[row] = token


@njit(nogil=True)
def _count_argmax_chunks(record: int) -> int:
    return _read_argmax(record).rows


@njit(nogil=True)
def _argmax_chunk(record: int, row: int) -> None:
    call = _read_argmax(record)
    logits = floats(call.logits + 4 * row * call.vocabulary, call.vocabulary)
    top, token = largest(logits), 0
    while token < call.vocabulary - 1 and logits[token] < top:
        token += 1
    carray(pointer(call.tokens), (call.rows,), np.int64)[row] = token


@njit(nogil=True)
def _count_exclude_chunks(record: int) -> int:
    return _read_exclude(record).masks


@njit(nogil=True)
def _exclude_chunk(record: int, chunk: int) -> None:
    call = _read_exclude(record)
    count, vocabulary = (call.vocabulary + 31) // 32, call.vocabulary
    place = carray(pointer(call.places), (call.masks,), np.int64)[chunk]
    words = carray(pointer(call.words + 4 * chunk * call.width), (count,), np.uint32)
    for w in range(count):
        word = words[w]
        if word == np.uint32(0xFFFFFFFF):
            continue
        first = 32 * w
        some = floats(call.logits + 4 * (place * vocabulary + first), min(32, vocabulary - first))
        if word == np.uint32(0):
            some[:] = np.float32(-np.inf)
            continue
        for i in range(some.shape[0]):
            if not (word >> np.uint32(i)) & np.uint32(1):
                some[i] = np.float32(-np.inf)


EXCLUDE_TOKENS = Kernel(ExcludeTokens, _count_exclude_chunks, _exclude_chunk)
DRAW_TOKENS = Kernel(DrawTokens, _count_draw_chunks, _draw_chunk)
TAKE_LARGEST = Kernel(TakeLargest, _count_argmax_chunks, _argmax_chunk)
