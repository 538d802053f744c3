"""The tables of rotary position embedding: cosine and sine of every position and frequency.

Each formula is evaluated in the order of transformers' `modeling_rope_utils`: at position 32,768 a difference
in the last bit of a frequency is an angle of 0.002.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from executor_service.backends.torch_backend.files.architecture.rope.spec import (
    DynamicNtk,
    LinearScaling,
    Llama3,
    LongRope,
    RopeSpec,
    Unrotated,
    Yarn,
)


class RopeTables(NamedTuple):
    """What a layer's queries and keys are multiplied by, by their positions; fp32."""

    cos: torch.Tensor  # [context, half of the rotated elements]
    sin: torch.Tensor  # the same
    query_scales: torch.Tensor  # [context], or [0] if all are 1

    def to(self, device: torch.device) -> RopeTables:
        """On another device."""
        return RopeTables(*(table.to(device) for table in self))


def rope_tables(rope: RopeSpec, dim: int, context: int) -> RopeTables:
    """The tables of a rotary embedding; `dim` elements of a head are rotated."""
    frequencies = _frequencies(rope, dim, context)
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies[None, :]
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return RopeTables(cos, sin, _query_scales(rope, context))


def _query_scales(rope: RopeSpec, context: int) -> torch.Tensor:
    if rope.query_growth == 0 or context <= rope.query_period:
        return torch.empty(0)
    periods = torch.floor(torch.arange(context) / rope.query_period)
    return 1 + rope.query_growth * torch.log(1 + periods)


def _frequencies(rope: RopeSpec, dim: int, context: int) -> torch.Tensor:
    """Radians per position, fp32 [dim / 2]: theta ** (-2i / dim), scaled."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    powers: torch.Tensor = rope.theta**exponents
    match rope.scaling:
        case None:
            return 1.0 / powers
        case Unrotated():
            return torch.zeros_like(powers)
        case LinearScaling(factor):
            return 1.0 / powers / factor
        case Llama3() as scaling:
            return _llama3(scaling, 1.0 / powers)
        case Yarn() as scaling:
            return _yarn(scaling, rope.theta, powers)
        case LongRope(short, long, original):
            return 1.0 / (torch.tensor(long if context > original else short) * powers)
        case DynamicNtk(factor, trained):
            length = torch.tensor(max(context, trained))
            growth = (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
            return 1.0 / (rope.theta * growth) ** exponents


def _llama3(scaling: Llama3, frequencies: torch.Tensor) -> torch.Tensor:
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(scaling: Yarn, theta: float, powers: torch.Tensor) -> torch.Tensor:
    dim = 2 * len(powers)

    def index(turns: float) -> float:
        """Of the frequency that makes `turns` turns within the original context."""
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    kept = 1 - ((torch.arange(len(powers), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
