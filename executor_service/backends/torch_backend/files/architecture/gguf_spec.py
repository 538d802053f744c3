"""`spec_from_gguf`: the spec of a GGUF file, from its metadata and the names of its tensors.

Source: the keys of the GGUF specification (github.com/ggml-org/ggml/blob/master/docs/gguf.md). Keys
under the architecture's name are hyperparameters, so unknown ones are refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.architecture.families import FAMILIES
from executor_service.backends.torch_backend.files.architecture.family import Family
from executor_service.backends.torch_backend.files.architecture.gguf_mixture import (
    mixture_from_gguf,
    mixture_keys,
)
from executor_service.backends.torch_backend.files.architecture.rope.from_gguf import (
    GROWTH_KEYS,
    rope_from_gguf,
)
from executor_service.backends.torch_backend.files.architecture.rope.spec import RopeSpec
from executor_service.backends.torch_backend.files.architecture.spec import (
    MAX_END_IDS,
    MAX_LAYERS,
    ModelSpec,
    QkNorm,
    Scales,
    WindowSpec,
    checked,
)
from executor_service.files.fields import Fields, shown

_LAYERS_OF_27B = {"gemma3_text": 62, "gemma2": 46}
"""Numbers of layers by which llama.cpp knows the 27B models, whose scores have another scale."""
# The first one of families with the same name: to llama.cpp Mistral is Llama.
_ARCHITECTURES = {family.gguf: architecture for architecture, family in reversed(list(FAMILIES.items()))}
_BY_KEY = {"llama.expert_count": "mixtral", "olmo2.attention.sliding_window": "olmo3"}
"""Architectures with another one's name in GGUF files, by keys that tell them apart unless they are 0."""
_HARMLESS = (
    "attention.layer_norm_epsilon",  # of norms that these architectures don't have
    "pooling_type",  # of embeddings, not of logits
    "rope.scaling.finetuned",
)
_OF_IMAGES = (
    "rope.dimension_sections",  # of a token's place in time, rows and columns: in a text they are the same
    "n_deepstack_layers",
)
"""Keys of the text models of `RopeRule.sections`, which say nothing of texts."""
_OF_MIXERS = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
"""Keys under "ssm." of layers without attention, also of Granite 4's models that have none."""
_ENDS = ("eos", "eot", "eom")  # of a text, a turn, and a message that waits for a tool
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_OF_MULTIPLIERS = ("embedding_scale", "residual_scale", "logit_scale", "expert_shared_feed_forward_length")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys((*_CAPS, "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.output_scale", "attention.temperature_scale"), (0, 1)),
    "attention.temperature_length": (0,),
    "attention.causal": (True,),
    "attention.shared_kv_layers": (0,),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("reference", "Meta AI original pth"),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "expert_gating_func": (0, 1),  # unset, softmax
    **dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("leading_dense_block_count", "n_deepstack_layers"), (0,)),
    **dict.fromkeys(("interleave_moe_layer_step", "moe_every_n_layers"), (0, 1)),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"), (0,)),
}
"""Keys that change the model's results, each with the values at which it changes nothing."""


def spec_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, object],
    rope_factors: Mapping[str, tuple[float, ...]],
    where: str,
) -> ModelSpec:
    """The spec of a GGUF file; `rope_factors`: what `rope.from_gguf` needs of tensors. Raises ModelError."""
    f = Fields(metadata, where)
    name = f.get("general.architecture", None)
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise f.fault(f"general.architecture {shown(name)} is not supported, only {known}")
    architecture = _ARCHITECTURES[name]
    for key, other in _BY_KEY.items():
        if key.startswith(f"{name}.") and f.get(key, 0):
            architecture = other
    family = FAMILIES[architecture]
    for key, accepted in _NEUTRAL.items():
        if key not in _own_keys(family) and not (family.rope.sections and key in _OF_IMAGES):
            f.only(f"{name}.{key}", accepted)
    if family.multipliers:
        f.only(f"{name}.rope.scaling.finetuned", (True,))  # to llama.cpp a Granite without it isn't rotated
        f.only(f"{name}.expert_shared_feed_forward_length", (0, f.get(f"{name}.feed_forward_length", 0)))
        f.ignore(*(f"{name}.ssm.{key}" for key in _OF_MIXERS))
    f.ignore(*(f"{name}.{key}" for key in _HARMLESS))
    if family.rope.sections:
        f.ignore(*(f"{name}.{key}" for key in _OF_IMAGES))
    blocks = f.size(f"{name}.block_count", max_size=MAX_LAYERS)
    layers = blocks - f.count(f"{name}.nextn_predict_layers", 0)  # which draft tokens, and come last
    if layers < 1:
        raise f.fault(f"{name}.nextn_predict_layers leaves none of {name}.block_count {blocks}")
    hidden, heads = f.size(f"{name}.embedding_length"), f.size(f"{name}.attention.head_count")
    head_dim = f.size(f"{name}.attention.key_length", max(hidden // heads, 1))
    if f.size(f"{name}.attention.value_length", head_dim) != head_dim:
        raise f.fault(f"{name}.attention.value_length other than that of keys is not supported")
    rotary_dim = f.size(f"{name}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim and family.rope.partial is None:
        raise f.fault(f"{name}.rope.dimension_count: rotating a part of each head is not supported")
    context = f.size(f"{name}.context_length")
    scale = head_dim**-0.5 if layers != _LAYERS_OF_27B.get(architecture) else (hidden // heads) ** -0.5
    scales = _scales(f, name, family, hidden, scale)
    caps = _caps(f, name, family)
    tokens = f.get("tokenizer.ggml.tokens", None)
    vocab_size = f.size(f"{name}.vocab_size", len(tokens) if isinstance(tokens, list) else None)
    moe = mixture_from_gguf(f, name, family, layers)
    stops = [
        i
        for kind in _ENDS
        for i in f.end_ids(f"tokenizer.ggml.{kind}_token_id", vocab_size, MAX_END_IDS // (len(_ENDS) + 1))
    ]
    if isinstance(tokens, list):
        stops += [tokens.index(end, 0, vocab_size) for end in family.gguf_ends if end in tokens[:vocab_size]]
    rope = rope_from_gguf(f, name, rotary_dim, context, rope_factors, family.rope)
    window = _window(f, name, family, layers, context, rope)
    qk_norm = family.qk_norm
    if family.qk_norm_flagged and "blk.0.attn_q_norm.weight" not in tensors:
        qk_norm = QkNorm.NONE
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(f, f"{name}.attention.head_count_kv", heads, blocks),
        head_dim=head_dim,
        intermediate_size=f.size(f"{name}.feed_forward_length", 1 if moe else None),
        context_length=rope.longest_context(context),
        norm_eps=f.number(f"{name}.attention.layer_norm_rms_epsilon") / scales.residual**2,
        norms=family.norms,
        norm_offset=0.0,
        embedding_scale=scales.embedding / scales.residual,
        attention_scale=scales.scores,
        activation=Activation.CLAMPED if moe and moe.clamped else family.activation[1],
        rope=rope,
        rotary_dim=rotary_dim,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=qk_norm,
        tied_embeddings="output.weight" not in tensors,
        window=window,
        moe=moe,
        eos_token_ids=tuple(dict.fromkeys(stops)),
        unrotated=_unrotated(family, layers, window),
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        sinks=family.sinks,
        score_cap=caps[0],
        logit_cap=caps[1],
        logit_scale=scales.logits,
    )
    f.refuse_unread(f"{name}.")
    return checked(f, spec)


def _own_keys(family: Family) -> Collection[str]:
    """The keys of `_NEUTRAL` that this family reads."""
    return (
        *mixture_keys(family.mixture),
        *(_OF_MULTIPLIERS if family.multipliers else ()),
        *(GROWTH_KEYS if family.rope.grows else ()),
        *(_CAPS if family.caps else ()),
    )


def _kv_heads(f: Fields, key: str, heads: int, blocks: int) -> int:
    """Their number, which files of Granite 4 repeat for each block."""
    value = f.get(key, heads)
    if isinstance(value, list) and value and value == value[:1] * blocks:
        value = value[0]
    return Fields({key: value}, f.where).size(key)


def _scales(f: Fields, name: str, family: Family, hidden: int, expected: float) -> Scales:
    """What multiplies a model's numbers; `expected`: the scale of scores where the file does not say it."""
    if family.multipliers:
        embedding, residual = (f.number(f"{name}.{what}_scale", 1.0) for what in ("embedding", "residual"))
        scores = f.number(f"{name}.attention.scale", expected)
        return Scales(embedding, residual, scores, 1 / f.number(f"{name}.logit_scale", 1.0))
    scale = f.get(f"{name}.attention.scale", 0)
    if not isinstance(scale, (int, float)) or not (scale == 0 or math.isclose(scale, expected, rel_tol=1e-5)):
        raise f.fault(f"{name}.attention.scale {shown(scale)} is not supported, only {expected:g}")
    return Scales(hidden**0.5 if family.scaled_embedding else 1.0, 1.0, expected, 1.0)


def _caps(f: Fields, name: str, family: Family) -> tuple[float, float]:
    """Of attention scores and logits; 0: none."""
    if family.caps is None:
        return 0.0, 0.0
    scores, logits = (
        f.number(f"{name}.{key}", default) for key, default in zip(_CAPS, family.caps, strict=True)
    )
    return scores, logits


def _unrotated(family: Family, layers: int, window: WindowSpec | None) -> frozenset[int]:
    """The layers without a rotary embedding, of which the format says nothing: these are llama.cpp's."""
    if window is not None and family.window is not None and family.window.only_rotated:
        return frozenset(range(layers)) - window.layers
    every = family.unrotated_every
    return frozenset(i for i in range(layers) if every and (i + 1) % every == 0)


def _window(
    f: Fields, name: str, family: Family, layers: int, context: int, rope: RopeSpec
) -> WindowSpec | None:
    rule = family.window
    size_key, pattern_key = f"{name}.attention.sliding_window", f"{name}.attention.sliding_window_pattern"
    size, pattern = f.get(size_key, 0), f.get(pattern_key, rule.period if rule and rule.period else 0)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise f.fault(f"{size_key} is {shown(size)}, expected a number of tokens")
    if rule is None or rule.flagged:  # llama.cpp computes none for these
        if 0 < size < context:
            raise f.fault(f"{size_key} {size} is not supported")
        return None
    if isinstance(pattern, list) and len(pattern) == layers and all(type(one) is bool for one in pattern):
        sliding = frozenset(i for i, one in enumerate(pattern) if one)
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:
        sliding = frozenset(i for i in range(layers) if not pattern or (i + 1) % pattern)
    else:
        raise f.fault(
            f"{pattern_key} is {shown(pattern)}, expected a number, or a truth value for each layer"
        )
    if rule.rope_theta is not None:
        # With one theta for all layers, windows have the file's, without its scaling (llama.cpp, of OLMo-3).
        theta = rope.theta if rule.rope_theta == family.rope.theta else rule.rope_theta
        rope = RopeSpec(f.number(f"{name}.rope.freq_base_swa", theta))
    if not size or not sliding or (size >= context and not rule.matters):
        return None
    return WindowSpec(size, sliding, rope)
