"""The least time that a step can take: what it must read over the bandwidth, compute over the rate.

Weights are read once a step, every row's keys and values once (roofline model: Williams, Waterman,
Patterson 2009). Of a mixture's experts those are read that some token chose, in expectation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.stored_names import EMBEDDING
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes

ITEM_BYTES = 2  # bf16


@dataclass(frozen=True, slots=True)
class Machine:
    """Two ceilings of a device, measured on it."""

    bytes_per_s: float  # read and written
    flop_per_s: float  # bf16 matrix products


H100 = Machine(3.0e12, 790e12)
"""What was measured on one H100 SXM: taken where this run has not measured its own."""


@dataclass(frozen=True, slots=True)
class _Parameters:
    """How many a step touches."""

    dense: int  # in every step: attention, norms, dense MLPs, routers
    head: int  # the output layer; the embedding itself is a few rows, and not counted
    experts: int  # of all mixtures together


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Of all layers."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * ITEM_BYTES


def weight_bytes(spec: ModelSpec, tokens: int) -> float:
    """Read by a step of so many tokens."""
    p = _parameters(spec)
    return ITEM_BYTES * (p.dense + p.head + p.experts * _share_of_experts(spec, tokens))


def decode_floor_s(spec: ModelSpec, rows: int, context: int, machine: Machine) -> float:
    """Seconds of a step of `rows` decodes, `context` tokens cached for each."""
    p = _parameters(spec)
    read = weight_bytes(spec, rows) + rows * context * kv_bytes_per_token(spec)
    active = p.dense + p.head + p.experts * _active_share(spec)
    return max(read / machine.bytes_per_s, 2 * active * rows / machine.flop_per_s)


def prefill_floor_s(spec: ModelSpec, tokens: int, machine: Machine) -> float:
    """Seconds of a prompt of `tokens` in one step, logits of its last token alone."""
    p = _parameters(spec)
    active = p.dense + p.experts * _active_share(spec)
    attention = 2 * tokens**2 * spec.heads * spec.head_dim * spec.layers  # causal: half of 4 T^2 d
    flops = 2 * active * tokens + attention + 2 * p.head
    read = weight_bytes(spec, tokens) + tokens * kv_bytes_per_token(spec)
    return max(read / machine.bytes_per_s, flops / machine.flop_per_s)


def _parameters(spec: ModelSpec) -> _Parameters:
    sizes = {name: math.prod(shape) for name, shape in expected_shapes(spec)}
    experts = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    embedding = sizes[EMBEDDING]
    head = embedding  # tied or not, of the same size
    whole = sum(sizes.values()) - embedding - (0 if spec.tied_embeddings else head)
    return _Parameters(dense=whole - experts, head=head, experts=experts)


def _active_share(spec: ModelSpec) -> float:
    return spec.moe.experts_per_token / spec.moe.experts if spec.moe else 0.0


def _share_of_experts(spec: ModelSpec, tokens: int) -> float:
    """The expected share of a layer's experts that at least one of so many tokens chose, evenly routed."""
    return 1 - (1 - _active_share(spec)) ** tokens
