"""`spec_from_config`: the spec of a Hugging Face directory, from its config.json.

Fields and their defaults are those of `LlamaConfig`, `Qwen2Config`, `Qwen3Config` and `Qwen3MoeConfig` in
transformers 5. config.json has many fields that do not affect results, so unknown fields are ignored. Fields
known to change results are refused by name, unless their value is one that changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor_service.backends.torch_backend.spec import (
    ARCHITECTURES,
    MAX_END_IDS,
    MAX_EXPERTS,
    MAX_LAYERS,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    checked,
)
from executor_service.files.fields import Fields, shown

_QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
}
_SLIDING_WINDOW, _FIRST_SLIDING_LAYER = 4096, 28  # defaults of Qwen2 and Qwen3

_SILU = ("silu", "swish")
_ON, _OFF, _ONE, _NONE = (True,), (False,), (1,), (0,)
_NEVER = ()
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # activations and norms
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "act_fn"), _SILU),
    **dict.fromkeys(("norm_type", "normalization_type"), ("rms_norm", "rmsnorm", "RMSNorm")),
    **dict.fromkeys(("add_unit_offset", "rms_norm_add_unit_offset", "zero_centered_gamma"), _OFF),
    # scales of embeddings, residuals, attention and logits
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "lm_head_multiplier"), _ONE),
    **dict.fromkeys(("logit_scale", "logits_scaling", "scale_emb", "key_multiplier"), _ONE),
    **dict.fromkeys(("embedding_scale", "residual_scale", "output_multiplier_scale"), _ONE),
    **dict.fromkeys(("attention_multiplier", "attention_scale", "attn_scale", "softmax_scale"), _NEVER),
    **dict.fromkeys(("query_pre_attn_scalar", "scale_depth", "dim_model_base", "mlp_multipliers"), _NEVER),
    **dict.fromkeys(("scale_embedding", "attn_temperature_tuning", "use_logn_attn"), _OFF),
    # clipping
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), _NEVER),
    **dict.fromkeys(("router_logit_softcapping", "clip_qkv", "swiglu_limit"), _NEVER),
    # biases
    **dict.fromkeys(("mlp_bias", "lm_head_bias", "use_bias", "bias", "attention_out_bias"), _OFF),
    # which positions are seen
    "is_causal": _ON,
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"), _OFF),
    **dict.fromkeys(("attention_chunk_size", "sliding_window_pattern", "cross_attention_layers"), ([],)),
    **dict.fromkeys(("attn_output_gate", "attention_sink", "use_attention_sinks"), _OFF),
    # positions
    "position_embedding_type": ("rope", "rotary"),
    **dict.fromkeys(("alibi", "rope_interleaved", "rope_interleave", "use_mrope", "use_dynamic_ntk"), _OFF),
    **dict.fromkeys(("rotary_pct", "rotary_percent", "rope_percent", "rope_ratio"), _ONE),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "mrope_section", "rotary_dim"), ([],)),
    # layers
    **dict.fromkeys(("use_parallel_residual", "parallel_residual", "parallel_attn"), _OFF),
    **dict.fromkeys(("num_kv_shared_layers", "num_memory_blocks"), _NONE),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"), _NEVER),
    **dict.fromkeys(("pruned_heads", "per_layer_config"), ({},)),
    # experts
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "shared_expert_intermediate_size"), _NONE),
    **dict.fromkeys(("n_routed_experts", "first_k_dense_replace"), _NONE),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), (0, 1)),
    **dict.fromkeys(("routed_scaling_factor", "moe_layer_freq"), _ONE),
    **dict.fromkeys(("scoring_func", "expert_gating_func"), ("softmax",)),
    **dict.fromkeys(("use_expert_bias", "use_routing_bias", "moe_router_enable_expert_bias"), _OFF),
    # other forms of a model
    **dict.fromkeys(("quantization_config", "compression_config"), _NEVER),
    **dict.fromkeys(("text_config", "vision_config", "audio_config"), _NEVER),
}
"""Fields that change the model's results, each with the values at which it changes nothing; null is one."""


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec of a Hugging Face directory; `where` names the file in errors. Raises ModelError.

    `generation` is what generation_config.json holds; its end ids come first.
    """
    f = Fields(config, where)
    architecture = f.get("model_type", None)
    if architecture not in ARCHITECTURES:
        raise f.fault(f"model_type {shown(architecture)} is not supported, only {', '.join(ARCHITECTURES)}")
    if f.get("quantization_config", None) is not None:
        raise f.fault("quantization_config is not supported: give unquantized weights, or a GGUF file")
    for key, accepted in _NEUTRAL.items():
        f.only(key, accepted)
    defaults = _DEFAULTS[architecture]

    def size(key: str) -> int:
        return f.size(key, defaults.get(key))

    qwen2, qk_norm = architecture == "qwen2", architecture in ("qwen3", "qwen3_moe")
    f.only("qkv_bias", (qwen2,))
    for key in ("qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_layernorm"):
        f.only(key, (qk_norm,))
    layers = f.size("num_hidden_layers", defaults["num_hidden_layers"], MAX_LAYERS)
    context = size("max_position_embeddings")
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    vocab_size = size("vocab_size")
    _refuse_sliding_window(f, architecture, layers, context)
    attention_bias = f.flag("attention_bias", default=False)
    end_ids = "eos_token_id", vocab_size, MAX_END_IDS
    stops = Fields(generation, "generation_config.json").end_ids(*end_ids) or f.end_ids(*end_ids)
    # Null means as many KV heads as heads; where the field is missing, the class has its own default.
    kv_heads = heads if "num_key_value_heads" in config else defaults.get("num_key_value_heads", heads)
    return checked(
        f,
        ModelSpec(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=f.size("num_key_value_heads", kv_heads),
            head_dim=f.size("head_dim", defaults.get("head_dim", max(hidden // heads, 1))),
            intermediate_size=size("intermediate_size"),
            context_length=context,
            norm_eps=f.number("rms_norm_eps", 1e-6),
            rope=_rope(f, context),
            qkv_bias=attention_bias or qwen2,
            output_bias=attention_bias and not qwen2,
            qk_norm=qk_norm,
            tied_embeddings=f.flag("tie_word_embeddings", default=False),
            moe=_moe(f, architecture, layers),
            eos_token_ids=stops,
        ),
    )


def _moe(f: Fields, architecture: str, layers: int) -> MoeSpec | None:
    if architecture != "qwen3_moe":
        for key in ("num_experts", "num_local_experts"):
            f.only(key, _NONE)
        return None
    defaults = _DEFAULTS[architecture]
    # transformers renamed num_experts to num_local_experts in version 5
    names = [name for name in ("num_local_experts", "num_experts") if f.get(name, None) is not None]
    if len({f.size(name, max_size=MAX_EXPERTS) for name in names}) > 1:
        raise f.fault(f"num_experts {f.values['num_experts']} is not num_local_experts")
    step, dense = f.size("decoder_sparse_step", 1), frozenset(f.ids("mlp_only_layers"))
    return MoeSpec(
        experts=f.size(names[0] if names else "num_experts", 128, MAX_EXPERTS),
        experts_per_token=f.size("num_experts_per_tok", defaults["num_experts_per_tok"], MAX_EXPERTS),
        intermediate_size=f.size("moe_intermediate_size", defaults["moe_intermediate_size"]),
        norm_topk_prob=f.flag("norm_topk_prob", default=False),
        sparse_layers=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


def _rope(f: Fields, context: int) -> RopeSpec:
    # transformers 5 writes `rope_parameters`; before that, `rope_theta` beside `rope_scaling`, which wins.
    key = "rope_scaling" if f.get("rope_scaling", None) else "rope_parameters"
    given = f.get(key, {})
    if not isinstance(given, Mapping):
        raise f.fault(f"{key} is not an object")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise f.fault(f"{key} with an object for each type of layer is not supported")
    r = Fields(given, f"{f.where}: {key}")
    theta = r.number("rope_theta", f.number("rope_theta", 10_000.0))
    for fields in (f, r):
        fields.only("partial_rotary_factor", _ONE)
    kind = r.get("rope_type", r.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", r.number("factor"))
    if kind == "llama3":
        low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
        if not low < high:
            raise r.fault(f"low_freq_factor {low} is not below high_freq_factor {high}")
        name = "original_max_position_embeddings"  # beside rope_parameters, too: that one wins
        original = f.size(name) if f.get(name, None) is not None else r.size(name, context)
        return RopeSpec(theta, "llama3", r.number("factor"), low, high, original)
    raise r.fault(f"rope type {shown(kind)} is not supported, only linear and llama3")


def _refuse_sliding_window(f: Fields, architecture: str, layers: int, context: int) -> None:
    given = f.get("layer_types", None)
    kinds = ["full_attention"] * layers if given is None else given
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise f.fault(f"layer_types is {shown(kinds)}, expected a list of {layers} types")
    if any(kind != "full_attention" for kind in kinds[:layers]):
        raise f.fault("layer_types other than full_attention (sliding window) are not supported")
    decided = given is not None and architecture != "qwen3_moe"  # Qwen3-MoE ignores layer_types
    if decided or not f.flag("use_sliding_window", default=False):
        return
    window = f.values.get("sliding_window", _SLIDING_WINDOW)
    # In Qwen3-MoE the window applies to all layers.
    first = 0 if architecture == "qwen3_moe" else f.get("max_window_layers", _FIRST_SLIDING_LAYER)
    if window is None or (isinstance(window, int) and window >= context):
        return
    if not isinstance(first, int) or first < layers:
        raise f.fault(f"use_sliding_window (a sliding window of {shown(window)}) is not supported")
