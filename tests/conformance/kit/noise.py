"""The sampling noise of executor.proto's header comment, written from that text alone.

Shares no code with any executor: an error copied from there would go unseen here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = "paceline-gumbel-1"
"""The `Fingerprints.sampler` that this file speaks for."""

_U64, _U32 = (1 << 64) - 1, (1 << 32) - 1


def key(seed: int, position: int) -> int:
    """`k` of the text."""
    x = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & _U64
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _U64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _U64
    return x ^ x >> 31


def token_hash(seed: int, position: int, token: int) -> int:
    """`h` of the text for one token id, at the position of the token being sampled."""
    k = key(seed, position)
    x = (token * 0x9E3779B1 ^ k) & _U32
    x = (x ^ x >> 16) * 0x85EBCA6B & _U32
    x = (x ^ x >> 13) * 0xC2B2AE35 & _U32
    x = (x ^ x >> 16) + (k >> 32) & _U32
    x = (x ^ x >> 16) * 0x7FEB352D & _U32
    x = (x ^ x >> 15) * 0x846CA68B & _U32
    return x ^ x >> 16


def token_hashes(seed: int, position: int, vocab_size: int) -> NDArray[np.uint32]:
    """`h` of every token id of a vocabulary."""
    k = key(seed, position)
    x: NDArray[Any] = np.arange(vocab_size, dtype=np.uint64)  # wide, and cut to 32 bits after each product
    x = (x * 0x9E3779B1 ^ k) & _U32
    x = (x ^ x >> 16) * 0x85EBCA6B & _U32
    x = (x ^ x >> 13) * 0xC2B2AE35 & _U32
    x = (x ^ x >> 16) + (k >> 32) & _U32
    x = (x ^ x >> 16) * 0x7FEB352D & _U32
    x = (x ^ x >> 15) * 0x846CA68B & _U32
    return (x ^ x >> 16).astype(np.uint32)


def gumbel(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """The noise of every token id."""
    return noise_of(token_hashes(seed, position, vocab_size))


def noise_of(hashes: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Hashes as noise; w is rounded to fp32 as the text demands, the logs are not."""
    w = hashes.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    clamped = np.minimum(w, np.float32(1 - 2.0**-24)).astype(np.float64)
    return -np.log(-np.log1p(-clamped))
