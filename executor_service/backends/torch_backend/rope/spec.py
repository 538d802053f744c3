"""`RopeSpec`: rotary position embedding, and how a model's frequencies differ from the plain ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Linear:
    """All frequencies are divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's: low frequencies are divided by `factor`, high ones stay, those between are blended."""

    factor: float
    low_freq_factor: float  # turns within the original context, below which a frequency is low
    high_freq_factor: float  # and above which it is high
    original_context: int  # tokens


Scaling = Linear | Llama3


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021): frequencies theta ** (-2i / dim), then changed."""

    theta: float
    scaling: Scaling | None = None
    divisors: tuple[float, ...] = ()  # of each frequency after scaling; none: 1
