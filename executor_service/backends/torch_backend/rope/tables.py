"""The tables of rotary position embedding: cosine and sine of every position and frequency."""

from __future__ import annotations

import math

import torch

from executor_service.backends.torch_backend.rope.spec import Linear, Llama3, RopeSpec


def rope_tables(rope: RopeSpec, dim: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, fp32 [context, dim / 2] each; `dim` elements of a head are rotated."""
    frequencies = _frequencies(rope, dim)
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


def _frequencies(rope: RopeSpec, dim: int) -> torch.Tensor:
    """Radians per position, fp32 [dim / 2]: theta ** (-2i / dim), scaled."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies: torch.Tensor = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case Linear(factor):
            return frequencies / factor
        case Llama3() as scaling:
            turns = scaling.original_context * frequencies / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
            return (1 - blend) * frequencies / scaling.factor + blend * frequencies
        case None:
            return frequencies
