"""The normative sampling noise: a hash of (seed, position, token id), mapped to Gumbel noise.

Defined in protos/paceline/executor/v1/executor.proto ("Sampling noise"), with test vectors; this is
the numpy reference. No generator state exists anywhere, so a token does not depend on who computed
it, when, or beside whom. The mixers are SplitMix64's (Steele, Lea, Flood 2014), MurmurHash3's
32-bit one (Appleby) and lowbias32 (Wellons 2018); the mapping is the Gumbel-max trick.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SAMPLER_VERSION = "paceline-gumbel-1"
"""Changes whenever the same seed and logits would give other tokens."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """SplitMix64's output function on a uint64."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix64_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` of each element; any shape but a scalar's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(seed: int, position: int) -> int:
    """The uint64 key of one sampled position; `position` is the new token's index."""
    return mix64(seed + _GOLDEN * (position + 1))


def keys(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.uint64]:
    """`key` of each (seed, position) pair."""
    return mix64_array(seeds + np.uint64(_GOLDEN) * (positions.astype(np.uint64) + np.uint64(1)))


def index_seed(seed: int, index: int) -> int:
    """The seed of completion `index` among n: the request's own for index 0."""
    return seed if index == 0 else mix64(seed ^ mix64(_GOLDEN * index))


def hash_tokens(position_key: int | NDArray[np.uint64], ids: NDArray[np.integer]) -> NDArray[np.uint32]:
    """The uint32 hash of each token id under its position's key; an array of keys is broadcast."""
    position_key = np.asarray(position_key, dtype=np.uint64)
    low, high = position_key.astype(np.uint32), (position_key >> np.uint64(32)).astype(np.uint32)
    x = ids.astype(np.uint32) * np.uint32(0x9E3779B1) ^ low
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    x += high
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def gumbel(position_key: int | NDArray[np.uint64], ids: NDArray[np.integer]) -> NDArray[np.float32]:
    """Gumbel noise, fp32, for each token id: -log(-log1p(-w)) with w = (hash + 1/2) / 2^32."""
    w = hash_tokens(position_key, ids).astype(np.float32)
    w *= np.float32(2.0**-32)
    w += np.float32(2.0**-33)
    np.minimum(w, np.float32(1.0 - 2.0**-24), out=w)
    # numpy vectorizes log but not log1p: log1p(-w) = log(u) w / (1 - u) with u = 1 - w, within
    # two ulp (Kahan), and -w where u is 1.
    u = np.float32(1.0) - w
    lost = np.float32(1.0) - u
    tiny = lost == 0
    lost[tiny] = 1.0
    minus_log1p: NDArray[np.float32] = -np.log(u) * (w / lost)
    minus_log1p[tiny] = w[tiny]
    np.log(minus_log1p, out=minus_log1p)
    return -minus_log1p
