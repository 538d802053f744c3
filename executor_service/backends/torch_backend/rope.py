"""The tables of rotary position embedding: cosine and sine of every position and frequency."""

from __future__ import annotations

import math

import torch

from executor_service.backends.torch_backend.spec import ModelSpec, RopeSpec


def rope_tables(spec: ModelSpec, factors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, fp32 [context, head_dim / 2] each.

    factors: divisors of the frequencies, fp32 [head_dim / 2], where the model's file has them.
    """
    frequencies = _frequencies(spec.rope, spec.head_dim)
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.arange(spec.context_length, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


def _frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position, fp32 [head_dim / 2]: theta ** (-2i / head_dim), scaled as `rope.kind` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies: torch.Tensor = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Long waves are stretched by `factor`, short ones are unchanged, those between are interpolated.
        turns = rope.original_context * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies
