"""Rotary frequencies: the cosines and sines of every position."""

from __future__ import annotations

import math

import torch

from executor_service.backends.torch_backend.spec import ModelSpec, RopeSpec


def rope_tables(spec: ModelSpec, factors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [context, head_dim / 2]; `factors` divide the frequencies where a file has them."""
    frequencies = _frequencies(spec.rope, spec.head_dim)
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.arange(spec.context_length, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos(), angles.sin()


def _frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies: torch.Tensor = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Long waves are stretched by `factor`, short ones stay, those between are blended.
        turns = rope.original_context * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies
