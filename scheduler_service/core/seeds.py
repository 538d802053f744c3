"""The seed of each of n completions, as scheduler.proto defines it."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """SplitMix64's output function on a uint64 (Steele, Lea, Flood 2014; executor.proto)."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def index_seed(seed: int, index: int) -> int:
    """The seed of completion `index`: the request's own for index 0."""
    return seed if index == 0 else mix64(seed ^ mix64(_GOLDEN * index))
