"""`rope_from_config`: rotary position embedding as config.json says it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from executor_service.backends.torch_backend.files.architecture.rope.spec import (
    MAX_CONTEXT,
    DynamicNtk,
    LinearScaling,
    Llama3,
    LongRope,
    RopeSpec,
    Yarn,
)
from executor_service.files.fields import Fields, shown

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
_OLD_NAMES = {"su": "longrope"}  # Phi-3's first files
_ORIGINAL = "original_max_position_embeddings"
_BESIDE_ALPHA = {"factor": 1, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 1}
"""What HunYuan's files say beside `alpha`, and its models don't read."""


@dataclass(frozen=True, slots=True)
class RopeRule:
    """What the models of an architecture have beside the common fields, and their defaults."""

    theta: float = 10_000.0  # default
    partial: float | None = None  # default of `partial_rotary_factor`; None: it must be 1
    sections: bool = False  # frequencies are divided among a token's place in time, rows and columns
    grows: bool = False  # queries grow with their position (`llama_4_scaling_beta`)
    stretched: bool = False  # `alpha` of the type "dynamic" changes theta once, whatever the length
    missing: Mapping[str, Any] = field(default_factory=dict)  # `rope_parameters` of a file that has none


def rope_from_config(f: Fields, dim: int, positions: int, rule: RopeRule) -> RopeSpec:
    """What `rope_parameters` says, and the fields of older files. Raises ModelError.

    transformers 5 writes `rope_parameters`; before that, `rope_theta` stood beside `rope_scaling`, which
    wins. dim: rotated elements of a head. positions: `max_position_embeddings`.
    """
    given, key = _parameters(f)
    if any(isinstance(value, Mapping) for value in given.values()):
        raise f.fault(f"{key} with an object for each type of layer is not supported")
    r = Fields(given or rule.missing, f"{f.where}: {key}")
    if rule.sections:
        r = _without_sections(r, dim)
    if rule.stretched:
        r = _without_alpha(r, f.number("rope_theta", rule.theta), dim)
    growth, period = 0.0, 1
    if rule.grows and r.get("llama_4_scaling_beta", 0):
        growth, period = r.number("llama_4_scaling_beta"), r.size(_ORIGINAL)
        r.only("max_position_embeddings", (positions,))
    rope = _rope(f, r, f.number("rope_theta", rule.theta), dim, positions)
    return replace(rope, query_growth=growth, query_period=period)


def _without_sections(r: Fields, dim: int) -> Fields:
    """Without `mrope_section` (Qwen2-VL): in a text, a token's place is the same in each section."""
    sections = r.get("mrope_section", None)
    r.flag("mrope_interleaved", default=False)
    counts = sections if isinstance(sections, list) else []
    if sections is not None and (
        not all(type(n) is int and n > 0 for n in counts) or sum(counts) != dim // 2
    ):
        raise r.fault(f"mrope_section is {shown(sections)}, expected parts of {dim // 2} frequencies")
    kept = {key: value for key, value in r.values.items() if not key.startswith("mrope_")}
    for key in ("type", "rope_type"):
        if kept.get(key) == "mrope":
            kept[key] = "default"
    return Fields(kept, r.where)


def _without_alpha(r: Fields, theta: float, dim: int) -> Fields:
    """Without `alpha` (HunYuan), in place of which theta is larger: NTK-aware scaling (bloc97, 2023)."""
    if r.get("rope_type", r.get("type", None)) != "dynamic" or not r.get("alpha", 0):
        return r
    if dim < 4:
        raise r.fault("alpha needs at least 4 rotated elements of a head")
    for key, value in _BESIDE_ALPHA.items():
        r.only(key, (value,))
    stretched = r.number("rope_theta", theta) * r.number("alpha") ** (dim / (dim - 2))
    read = {"type", "alpha", *_BESIDE_ALPHA}
    kept = {key: value for key, value in r.values.items() if key not in read}
    return Fields(kept | {"rope_type": "default", "rope_theta": stretched}, r.where)


def ropes_from_config(
    f: Fields, dim: int, positions: int, rule: RopeRule, local_theta: float
) -> tuple[RopeSpec, RopeSpec]:
    """As `rope_from_config`, of layers without a window and of those with one, which have their own.

    `rope_parameters` has an object for each type of layer. In older files `rope_local_base_freq` is the theta
    of layers with a window, and `rope_scaling` is for the others.
    """
    objects = f.get("rope_parameters", {})
    scaling, local = f.get("rope_scaling", {}), f.number("rope_local_base_freq", local_theta)
    if not isinstance(objects, Mapping) or not isinstance(scaling, Mapping):
        raise f.fault("rope_parameters or rope_scaling is not an object")
    thetas = {"full_attention": f.number("rope_theta", rule.theta), "sliding_attention": local}
    if unknown := [key for key in objects if key not in thetas]:
        known = ", ".join(thetas)
        raise f.fault(f"rope_parameters: {shown(unknown[0])} is not supported, only objects for {known}")
    ropes = []
    for kind, default in thetas.items():
        given = objects.get(kind) or {}
        if not isinstance(given, Mapping):
            raise f.fault(f"rope_parameters: {kind} is not an object")
        r = Fields({**given, **(scaling if kind == "full_attention" else {})}, f"{f.where}: {kind}")
        ropes.append(_rope(f, r, default, dim, positions))
    return ropes[0], ropes[1]


def rotary_dim_from_config(f: Fields, head_dim: int, rule: RopeRule) -> int:
    """How many elements of a head are rotated. Raises ModelError."""
    given, key = _parameters(f)
    default = 1.0 if rule.partial is None else rule.partial
    if rule.partial is not None and f.get("rotary_dim", []) != []:  # in files of MiniMax-M2
        default = f.size("rotary_dim", max_size=head_dim) / head_dim
    outside, inside = f.number("partial_rotary_factor", default), Fields(given, f"{f.where}: {key}")
    share = inside.number("partial_rotary_factor", outside)
    if share > 1 or (share < 1 and rule.partial is None):
        where = inside if "partial_rotary_factor" in given else f
        raise where.fault(f"partial_rotary_factor {share} is not supported, only 1")
    kind = inside.get("rope_type", inside.get("type", "default"))
    if rule.partial is not None and rule.partial < 1 and kind != "default":
        raise inside.fault(f"rope_type {kind!r:.40} is not supported with partial_rotary_factor {share}")
    return int(head_dim * share)


def _parameters(f: Fields) -> tuple[Mapping[str, Any], str]:
    """The object that says what is rotated how, and its name."""
    given, key = f.get("rope_parameters", {}), "rope_parameters"
    if scaling := f.get("rope_scaling", {}):
        given, key = scaling, "rope_scaling"
    if not isinstance(given, Mapping):
        raise f.fault(f"{key} is not an object")
    return given, key


def _rope(f: Fields, r: Fields, theta: float, dim: int, positions: int) -> RopeSpec:
    """What an object says; `f`: the fields beside it."""
    theta = r.number("rope_theta", theta)
    r.ignore("partial_rotary_factor")
    kind = r.get("rope_type", r.get("type", "default"))
    # The length that the model was first trained for. transformers prefers the field beside the object.
    beside_original = f.get(_ORIGINAL, None)
    rope = _scaled(r, str(kind), theta, dim, positions, beside_original and f.size(_ORIGINAL))
    if (context := rope.longest_context(positions)) > MAX_CONTEXT:
        raise r.fault(f"factor makes a context of {context} tokens, at most {MAX_CONTEXT} are supported")
    r.refuse_unread(why=f"has no meaning for the rope type {shown(kind)}")
    return rope


def _scaled(
    r: Fields, kind: str, theta: float, dim: int, positions: int, beside_original: int | None
) -> RopeSpec:
    """The rotary embedding of a kind; reads only that kind's fields, since unread ones are refused.

    beside_original: the original context, where a field outside of `r` says it.
    """

    def original() -> int:
        inside = r.size(_ORIGINAL, positions)
        return beside_original or inside

    match _OLD_NAMES.get(kind, kind):
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, LinearScaling(r.number("factor")))
        case "llama3":
            return RopeSpec(theta, _llama3(r, original()))
        case "yarn":
            return _yarn(r, theta, positions, original())
        case "longrope":
            return _longrope(r, theta, dim, positions, original())
        case "dynamic":
            if dim < 4:
                raise r.fault("the rope type 'dynamic' needs at least 4 rotated elements of a head")
            return RopeSpec(theta, DynamicNtk(r.number("factor"), positions))
    raise r.fault(f"rope type {shown(kind)} is not supported, only {', '.join(KINDS)}")


def _llama3(r: Fields, original_context: int) -> Llama3:
    low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
    if not low < high:
        raise r.fault(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3(r.number("factor"), low, high, original_context)


def _yarn(r: Fields, theta: float, positions: int, original_context: int) -> RopeSpec:
    """The attention factor is the paper's, unless the file gives one, or two scales to divide (DeepSeek)."""
    if theta == 1.0:
        raise r.fault("rope_theta 1 has no frequencies that yarn can tell apart")
    r.ignore("finetuned")  # says of the first files whether the model was trained for it
    factor = r.number("factor", positions / original_context)
    fast, slow = r.number("beta_fast", 32.0), r.number("beta_slow", 1.0)
    if fast < slow:
        raise r.fault(f"beta_fast {fast} is below beta_slow {slow}")
    scales = [r.number(key) if r.get(key, 0) else None for key in ("mscale", "mscale_all_dim")]
    attention_factor = mscale(factor)
    if scales[0] and scales[1]:
        attention_factor = mscale(factor, scales[0]) / mscale(factor, scales[1])
    return RopeSpec(
        theta,
        Yarn(factor, original_context, fast, slow, r.flag("truncate", default=True)),
        attention_factor=r.number("attention_factor", attention_factor),
    )


def mscale(factor: float, scale: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines by; `scale`: DeepSeek's of its logarithm."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(r: Fields, theta: float, dim: int, positions: int, original_context: int) -> RopeSpec:
    """The attention factor is the paper's, unless the file gives one."""
    factor = r.number("factor", positions / original_context)
    attention_factor = 1.0
    if factor > 1:
        if original_context < 2:
            raise r.fault(f"{_ORIGINAL} is {original_context}, of which longrope takes the logarithm")
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_context))
    return RopeSpec(
        theta,
        LongRope(
            _factors(r, "short_factor", dim // 2), _factors(r, "long_factor", dim // 2), original_context
        ),
        attention_factor=r.number("attention_factor", attention_factor),
    )


def _factors(r: Fields, key: str, count: int) -> tuple[float, ...]:
    values = r.get(key, None)
    if values is None:
        raise r.fault(f"{key} is missing")
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(type(v) in (int, float) and 0 < v < math.inf for v in values)
    ):
        raise r.fault(f"{key} is {shown(values)}, expected {count} positive numbers, one for each frequency")
    return tuple(map(float, values))
