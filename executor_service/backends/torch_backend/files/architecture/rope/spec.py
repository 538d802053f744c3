"""`RopeSpec`: rotary position embedding, and how a model's frequencies differ from the plain ones."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CONTEXT = 1 << 24  # tokens


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's: low frequencies are divided by `factor`, high ones stay, those between are blended."""

    factor: float
    low_freq_factor: float  # turns within the original context, below which a frequency is low
    high_freq_factor: float  # and above which it is high
    original_context: int  # tokens


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023): as `Llama3`, but blended in proportion to the frequency's index."""

    factor: float
    original_context: int  # tokens
    beta_fast: float = 32.0  # turns within the original context, above which a frequency stays
    beta_slow: float = 1.0  # and below which it is divided
    truncate: bool = True  # the blend begins and ends at whole indices


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, other ones beyond the original context."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int  # tokens


@dataclass(frozen=True, slots=True)
class DynamicNtk:
    """Dynamic NTK: beyond the trained context theta grows with the length."""

    factor: float
    trained_context: int  # tokens


@dataclass(frozen=True, slots=True)
class Unrotated:
    """All frequencies are 0: nothing is rotated (NoPE, Kazemnejad et al. 2023)."""


Scaling = LinearScaling | Llama3 | Yarn | LongRope | DynamicNtk | Unrotated


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021): frequencies theta ** (-2i / dim), then changed.

    `LongRope` and `DynamicNtk` depend on a length. It is the served context, not the length of a sequence: a
    key stays in the cache as it was rotated, whatever length its sequence grows to and whoever shares it.
    """

    theta: float
    scaling: Scaling | None = None
    divisors: tuple[float, ...] = ()  # of each frequency after scaling; none: 1
    attention_factor: float = 1.0  # of cosines and sines
    query_growth: float = 0.0  # queries are multiplied by 1 + this times the log of 1 + their period
    query_period: int = 1  # tokens

    def longest_context(self, positions: int) -> int:
        """Tokens that a model for `positions` positions is scaled to.

        For `Yarn` and `DynamicNtk` that is the trained length times `factor`. The other kinds don't say what
        the model was trained for, or say it for a context that `positions` includes.
        """
        match self.scaling:
            case Yarn(factor, trained) | DynamicNtk(factor, trained):
                return max(positions, int(trained * factor))
        return positions


UNROTATED = RopeSpec(1.0, Unrotated())
"""The rotary embedding of layers that have none."""


@dataclass(frozen=True, slots=True)
class ServedLength:
    """Which frequencies all tokens have, whatever their sequence's length."""

    used: str
    change: str  # what another `max_context` would change
    differs: bool  # from transformers, for prompts up to the trained length


def served_length(rope: RopeSpec, context: int, longest: int) -> ServedLength | None:
    """For a served context of `context` tokens, of at most `longest`; None: no length decides anything."""
    match rope.scaling:
        case LongRope(original_context=trained):
            scaled, plain = "longrope, long factors", "longrope, short factors"
        case DynamicNtk(trained_context=trained):
            scaled, plain = f"dynamic NTK for {max(context, trained)} tokens", "dynamic NTK, not scaled"
        case _:
            return None
    if longest <= trained:
        return None
    if context > trained:
        change = f"-E max-context={trained}: {plain}, as transformers has it for prompts up to this length"
        return ServedLength(scaled, change, differs=True)
    change = f"-E max-context= above {trained}, up to {longest}: scaled, for longer prompts"
    return ServedLength(plain, change, differs=False)
