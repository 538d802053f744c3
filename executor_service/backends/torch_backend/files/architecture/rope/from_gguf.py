"""`rope_from_gguf`: rotary position embedding as a GGUF file's metadata and tensors say it.

Source: llama.cpp, which turns these keys into the arguments of `ggml_rope_ext`.
"""

from __future__ import annotations

from collections.abc import Mapping

from executor_service.backends.torch_backend.files.architecture.rope.from_config import (
    RopeRule,
    mscale,
)
from executor_service.backends.torch_backend.files.architecture.rope.spec import (
    MAX_CONTEXT,
    LinearScaling,
    LongRope,
    RopeSpec,
    Scaling,
    Yarn,
)
from executor_service.files.fields import Fields, shown

DIVISORS, LONG_FACTORS, SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
FACTOR_TENSORS = (DIVISORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors of a number for each frequency."""
_GROWTH, _ALL_DIM = GROWTH_KEYS = ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier")
"""Keys of `RopeRule.grows`. The second one is `mscale_all_dim` of config.json, where `mscale` is 1."""


def rope_from_gguf(
    f: Fields,
    name: str,
    dim: int,
    positions: int,
    factors: Mapping[str, tuple[float, ...]],
    rule: RopeRule,
) -> RopeSpec:
    """What the keys under `name`, as in "llama", and the tensors say. Raises ModelError.

    dim: rotated elements of a head. positions: `context_length`. factors: the `FACTOR_TENSORS` of the file.
    """
    prefix = f"{name}.rope."
    for tensor, values in factors.items():
        if len(values) != dim // 2:
            raise f.fault(f"tensor {tensor!r} has {len(values)} numbers, expected {dim // 2}")
    kind = f.get(f"{prefix}scaling.type", None)
    factor = f.number(f"{prefix}scaling.factor", 1.0)
    original = f.size(f"{prefix}scaling.original_context_length", positions)
    attention_factor = f.number(f"{prefix}scaling.attn_factor", 1.0)
    f.only(f"{prefix}scaling.yarn_ext_factor", (-1, 1) if kind == "yarn" else (-1, 0))
    yarn = Yarn(
        factor,
        original,
        f.number(f"{prefix}scaling.yarn_beta_fast", 32.0),
        f.number(f"{prefix}scaling.yarn_beta_slow", 1.0),
        rule.missing.get("truncate", True),
    )
    theta = f.number(f"{prefix}freq_base", 10_000.0)
    scaling: Scaling | None = None
    if LONG_FACTORS in factors or SHORT_FACTORS in factors or kind == "longrope":
        scaling = _longrope(f, prefix, kind, factors, original)
    elif kind == "yarn":
        if theta == 1.0:
            raise f.fault(f"{prefix}freq_base 1 has no frequencies that yarn can tell apart")
        scaling = yarn
        attention_factor *= mscale(factor)
        if rule.grows and f.get(f"{name}.{_ALL_DIM}", 0):
            attention_factor /= mscale(factor, f.number(f"{name}.{_ALL_DIM}"))
    elif kind in (None, "linear"):  # a factor alone means linear
        scaling = None if factor == 1.0 else LinearScaling(factor)
    elif kind != "none":
        known = "none, linear, yarn and longrope"
        raise f.fault(f"{prefix}scaling.type {shown(kind)} is not supported, only {known}")
    growth, period = 0.0, 1
    if rule.grows and f.get(f"{name}.{_GROWTH}", 0):
        growth, period = f.number(f"{name}.{_GROWTH}"), original
    rope = RopeSpec(theta, scaling, factors.get(DIVISORS, ()), attention_factor, growth, period)
    if (context := rope.longest_context(positions)) > MAX_CONTEXT:
        raise f.fault(f"{prefix}scaling.factor makes a context of {context} tokens, at most {MAX_CONTEXT}")
    return rope


def _longrope(
    f: Fields, prefix: str, kind: object, factors: Mapping[str, tuple[float, ...]], original: int
) -> LongRope:
    if kind not in (None, "longrope"):  # Phi-3's files don't say it
        raise f.fault(f"{prefix}scaling.type {shown(kind)} does not go with the tensor {LONG_FACTORS!r}")
    f.only(f"{prefix}scaling.factor", (1,))  # it would divide the frequencies once more
    for name in (LONG_FACTORS, SHORT_FACTORS):
        if name not in factors:
            raise f.fault(f"the tensor {name!r} is missing")
    if DIVISORS in factors:
        raise f.fault(f"tensor {DIVISORS!r} does not go with {LONG_FACTORS!r}")
    return LongRope(factors[SHORT_FACTORS], factors[LONG_FACTORS], original)
