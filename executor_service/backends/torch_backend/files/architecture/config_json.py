"""`spec_from_config`: the spec of a Hugging Face directory, from its config.json.

Fields and their defaults are those of the architecture's configuration in transformers 5 (`families.py`). A
field that is neither read here nor listed in `config_fields.py` is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from executor_service.backends.torch_backend.files.architecture.activation import CLAMP, SLOPE, Activation
from executor_service.backends.torch_backend.files.architecture.config_fields import HARMLESS, NEUTRAL
from executor_service.backends.torch_backend.files.architecture.config_windows import window_from_config
from executor_service.backends.torch_backend.files.architecture.config_wrappers import WRAPPERS, text_part
from executor_service.backends.torch_backend.files.architecture.families import FAMILIES
from executor_service.backends.torch_backend.files.architecture.family import Family, MixtureRule
from executor_service.backends.torch_backend.files.architecture.rope.from_config import (
    rope_from_config,
    ropes_from_config,
    rotary_dim_from_config,
)
from executor_service.backends.torch_backend.files.architecture.spec import (
    MAX_END_IDS,
    MAX_EXPERTS,
    MAX_LAYERS,
    ModelSpec,
    MoeSpec,
    QkNorm,
    Scales,
    WindowSpec,
    checked,
)
from executor_service.files.fields import Fields, shown

_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function", "act_fn")
_ACTIVATIONS = {
    Activation.SILU: ("silu", "swish"),
    Activation.GELU: ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
}


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec of a Hugging Face directory; `where` names the file in errors. Raises ModelError.

    `generation` is what generation_config.json holds; its end ids come first.
    """
    config, where = text_part(config, where)
    f = Fields(config, where)
    architecture = f.get("model_type", None)
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        known = ", ".join((*FAMILIES, *WRAPPERS))
        raise f.fault(f"model_type {shown(architecture)} is not supported, only {known}")
    family = FAMILIES[architecture]
    for key, accepted in NEUTRAL.items():
        if key not in family.own_fields:
            f.only(key, accepted)
    # The format of the weights is not about the spec: `checkpoints` reads it.
    f.ignore(*HARMLESS, *family.fields, "quantization_config")
    defaults = family.sizes

    def size(key: str) -> int:
        return f.size(key, defaults.get(key))

    for key, accepted in family.expected.items():
        f.only(key, accepted)
    if family.biases.qkv[0] != "qkv_bias":
        f.only("qkv_bias", (family.biases.qkv == ("", True),))
    qk_norm = family.qk_norm
    if family.qk_norm_flagged and not f.flag("use_qk_norm", default=False):
        qk_norm = QkNorm.NONE
    for key in ("qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_layernorm"):
        f.only(key, (qk_norm is not QkNorm.NONE,))

    def bias(rule: tuple[str, bool]) -> bool:
        field, default = rule
        return f.flag(field, default=default) if field else default

    layers = f.size("num_hidden_layers", defaults["num_hidden_layers"], MAX_LAYERS)
    f.only("attn_type_list", ([1] * layers,))  # of MiniMax: attention with pages in each layer
    positions = size("max_position_embeddings")
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    vocab_size = size("vocab_size")
    f.flag("attention_bias", default=False)  # of all, also of those that never have biases or always
    end_ids = "eos_token_id", vocab_size, MAX_END_IDS
    stops = Fields(generation, "generation_config.json").end_ids(*end_ids) or f.end_ids(*end_ids)
    f.ignore("eos_token_id")
    # Null means as many KV heads as heads; where the field is missing, the class has its own default.
    kv_heads = heads if "num_key_value_heads" in config else defaults.get("num_key_value_heads", heads)
    head_dim = f.size("head_dim", defaults.get("head_dim", max(hidden // heads, 1)))
    f.only("attention_head_dim", (head_dim,))  # the same, in files of HunYuan
    rotary_dim = rotary_dim_from_config(f, head_dim, family.rope)
    if family.window is not None and family.window.rope_theta is not None:
        ropes = ropes_from_config(f, rotary_dim, positions, family.rope, family.window.rope_theta)
        rope, local_rope = ropes
    else:
        rope = local_rope = rope_from_config(f, rotary_dim, positions, family.rope)
    if qk_norm is QkNorm.ROTATED and rope.attention_factor != 1:
        raise f.fault(
            "rope_parameters: a rope_type that scales what it rotates does not go with norms after it"
        )
    context = max(rope.longest_context(positions), local_rope.longest_context(positions))
    window = window_from_config(f, family.window, layers, context, local_rope)
    scales = _scales(f, family, hidden, head_dim)
    score_cap, logit_cap = _caps(f, family)
    moe = _moe(f, family, layers)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=f.size("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        intermediate_size=size(family.inner_field),
        context_length=context,
        norm_eps=f.number("rms_norm_eps", family.norm_eps) / scales.residual**2,
        norms=family.norms,
        norm_offset=family.norm_offset,
        embedding_scale=scales.embedding / scales.residual,
        attention_scale=scales.scores,
        activation=Activation.CLAMPED if moe and moe.clamped else _activation(f, *family.activation),
        rope=rope,
        rotary_dim=rotary_dim,
        qkv_bias=bias(family.biases.qkv),
        output_bias=bias(family.biases.output),
        qk_norm=qk_norm,
        tied_embeddings=f.flag("tie_word_embeddings", default=family.tied),
        window=window,
        moe=moe,
        eos_token_ids=stops,
        unrotated=_unrotated(f, family, layers, window),
        mlp_bias=bias(family.biases.mlp),
        sinks=family.sinks,
        score_cap=score_cap,
        logit_cap=logit_cap,
        logit_scale=scales.logits,
    )
    f.refuse_unread()
    return checked(f, spec)


def labels_from_config(config: Mapping[str, Any], where: str) -> int:
    """How many scores a classification head has: `id2label`, else `num_labels`, else 2. Raises ModelError."""
    f = Fields(config, where)
    names = f.get("id2label", None)
    if names is None:
        return f.size("num_labels", 2)
    if not isinstance(names, Mapping) or not names:
        raise f.fault(f"id2label is {shown(names)}, expected an object of labels")
    f.only("num_labels", (len(names),))
    return len(names)


def _scales(f: Fields, family: Family, hidden: int, head_dim: int) -> Scales:
    if family.multipliers:
        embedding, residual, scores = (
            f.number(f"{what}_multiplier", 1.0) for what in ("embedding", "residual", "attention")
        )
        return Scales(embedding, residual, scores, 1 / f.number("logits_scaling", 1.0))
    field = "query_pre_attn_scalar"
    size = f.number(field, family.sizes[field]) if field in family.fields else float(head_dim)
    return Scales(hidden**0.5 if family.scaled_embedding else 1.0, 1.0, 1 / math.sqrt(size), 1.0)


def _caps(f: Fields, family: Family) -> tuple[float, float]:
    """Of attention scores and logits; 0: none. Unlike other fields, null does not mean the default."""
    fields = ("attn_logit_softcapping", "final_logit_softcapping")
    if family.caps is None:
        return 0.0, 0.0
    given = [f.values.get(field, default) for field, default in zip(fields, family.caps, strict=True)]
    scores, logits = (
        0.0 if cap is None else f.number(field, cap) for field, cap in zip(fields, given, strict=True)
    )
    f.ignore(*fields)
    return scores, logits


def _unrotated(f: Fields, family: Family, layers: int, window: WindowSpec | None) -> frozenset[int]:
    """The layers without a rotary embedding."""
    if family.rotated_if_named:
        f.only("position_embedding_type", ("rope", "nope"))
        named = f.get("position_embedding_type", None) == "rope"
        return frozenset() if named else frozenset(range(layers))
    if window is not None and family.window is not None and family.window.only_rotated:
        return frozenset(range(layers)) - window.layers
    if not family.unrotated_every:
        return frozenset()
    interval = f.size("no_rope_layer_interval", family.unrotated_every)
    rotated = f.get("no_rope_layers", None)
    if rotated is None:
        rotated = [(i + 1) % interval != 0 for i in range(layers)]
    elif not isinstance(rotated, list) or len(rotated) < layers or any(one not in (0, 1) for one in rotated):
        raise f.fault(f"no_rope_layers is {shown(rotated)}, expected 0 or 1 for each of {layers} layers")
    return frozenset(i for i in range(layers) if not rotated[i])


def _activation(f: Fields, key: str, default: Activation) -> Activation:
    value = f.get(key, _ACTIVATIONS[default][0])
    for activation, names in _ACTIVATIONS.items():
        if value in names:
            for other in _ACTIVATION_KEYS:
                if other != key:
                    f.only(other, names)
            return activation
    known = ", ".join(name for names in _ACTIVATIONS.values() for name in names)
    raise f.fault(f"{key} {shown(value)} is not supported, only {known}")


def _moe(f: Fields, family: Family, layers: int) -> MoeSpec | None:
    rule = family.mixture
    if rule is None:
        for key in ("num_experts", "num_local_experts"):
            f.only(key, (0,))
        return None
    # transformers renamed num_experts to num_local_experts in version 5
    names = [name for name in rule.counts if f.get(name, None) is not None]
    if len({f.size(name, max_size=MAX_EXPERTS) for name in names}) > 1:
        raise f.fault(f"{' and '.join(names)} are not the same")
    step, dense, scale = 1, frozenset[int](), 1.0
    if rule.chosen:
        step, dense = f.size("decoder_sparse_step", 1), frozenset(f.ids("mlp_only_layers"))
    if rule.dense_first is not None:
        dense = frozenset(range(min(f.count("first_k_dense_replace", rule.dense_first), layers)))
    normed = rule.scaled is None or f.flag("norm_topk_prob", default=rule.scaled)
    if rule.corrected:
        scale = f.number("routed_scaling_factor", 1.0)
        f.only("scoring_func", ("sigmoid",))
        f.only("use_routing_bias", (True,))
    inner = f.size(rule.size_field, family.sizes.get(rule.size_field))
    if rule.clamped:
        f.only("hidden_act", _ACTIVATIONS[Activation.SILU])
        f.only("swiglu_alpha", (SLOPE,))
        f.only("swiglu_limit", (CLAMP,))
        f.only("experts_per_token", (f.get("num_experts_per_tok", rule.experts_per_token),))
    return MoeSpec(
        experts=f.size(names[0] if names else rule.counts[-1], rule.experts, MAX_EXPERTS),
        experts_per_token=f.size("num_experts_per_tok", rule.experts_per_token, MAX_EXPERTS),
        intermediate_size=inner,
        norm_topk_prob=normed,
        sparse_layers=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
        clamped=rule.clamped,
        corrected=rule.corrected,
        share_scale=scale,
        shared_size=_shared_size(f, family, rule, inner),
        shared_gate=rule.shared_gate,
    )


def _shared_size(f: Fields, family: Family, rule: MixtureRule, inner: int) -> int:
    """Neurons of the expert that all tokens have; inner: of another one."""
    if rule.shared_size:
        return f.size(rule.shared_size, family.sizes[rule.shared_size])
    return inner * f.size(rule.shared_count, family.sizes[rule.shared_count]) if rule.shared_count else 0
