"""Classes, sizes and variants of the families that came after the first ones; see `architectures.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

_ALTERNATING = ["sliding_attention", "full_attention"]
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 3.0,
}
GRANITE_HYBRID: dict[str, Any] = {
    "layer_types": ["attention"] * 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 56,
    "position_embedding_type": "rope",
    "mamba_n_heads": 2,
}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}}
_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_PAIRS = {"head_dim": 12}
_CAPPED = {"head_dim": 12, "query_pre_attn_scalar": 3, "sliding_window": 13, "layer_types": _ALTERNATING}
_GROWING = _YARN | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 5000.0, "alpha": 1000.0, "factor": 1.0}
CLASSES: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "granite": (GraniteConfig, _GRANITE),
    "granitemoehybrid": (GraniteMoeHybridConfig, _GRANITE | GRANITE_HYBRID),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "seed_oss": (SeedOssConfig, {"head_dim": 12}),
    "ernie4_5": (Ernie4_5Config, _PAIRS),
    "glm": (GlmConfig, _PAIRS | _HALF),
    "glm4": (Glm4Config, _PAIRS | _HALF),
    "hunyuan_v1_dense": (HunYuanDenseV1Config, {"head_dim": 12, "rope_parameters": _ALPHA}),
    "exaone4": (Exaone4Config, {"sliding_window": 13, "layer_types": _ALTERNATING}),
    "gemma2": (Gemma2Config, _CAPPED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gpt_oss": (
        GptOssConfig,
        {
            "head_dim": 12,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 13,
            "layer_types": _ALTERNATING,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
        | {"shared_expert_intermediate_size": 44},
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
        | {"n_shared_experts": 2, "routed_scaling_factor": 1.6, "head_dim": 12},
    ),
    "minimax_m2": (
        MiniMaxM2Config,
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12} | _HALF,
    ),
    "ministral3": (Ministral3Config, {"head_dim": 12, "rope_parameters": _GROWING}),
}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {"mlp-bias": {"mlp_bias": True, "attention_bias": True}},
    "granite": {
        "biases": {"mlp_bias": True, "attention_bias": True},
        "yarn": {"rope_parameters": _YARN},
        "large-residual": {"residual_multiplier": 3.0},
    },
    "granitemoehybrid": {
        "bias": {"attention_bias": True},
        "not-rotated": {"position_embedding_type": "nope"},
        "yarn": {"rope_parameters": _YARN},
        "large-residual": {"residual_multiplier": 3.0},
    },
    "smollm3": {
        "interval": {"no_rope_layers": None, "no_rope_layer_interval": 2},
        "rotated": {"no_rope_layers": [1, 1]},
        "biases": {"mlp_bias": True, "attention_bias": True},
        "yarn": {"rope_parameters": _YARN},
        "window": {
            "use_sliding_window": True,
            "sliding_window": 13,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    },
    "seed_oss": {
        "all-biases": {"attention_out_bias": True, "mlp_bias": True},
        "no-bias": {"attention_bias": False},
    },
    "ernie4_5": {"biases": {"use_bias": True}, "wide-heads": {"head_dim": 40}},
    "glm": {"no-bias": {"attention_bias": False}, "wide-heads": {"head_dim": 40}},
    "glm4": {"no-bias": {"attention_bias": False}, "wide-heads": {"head_dim": 40}},
    "hunyuan_v1_dense": {
        "bias": {"attention_bias": True},
        "wide-heads": {"head_dim": 40},
        "no-alpha": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    },
    "exaone4": {
        "no-window": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        "long-window": {"sliding_window": 300},
        "pattern": {"sliding_window_pattern": "LG"},
    },
    "gemma2": {
        "no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "window-of-one": {"sliding_window": 1},
        "bias": {"attention_bias": True},
    },
    "gpt_oss": {
        "no-bias": {"attention_bias": False},
        "one-expert": {"num_experts_per_tok": 1},
        "wide-heads": {"head_dim": 40},
        "windows-alone": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 1},
        "plain-rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    },
    "olmoe": {
        "shares-of-one": {"norm_topk_prob": True},
        "one-expert": {"num_experts_per_tok": 1},
        "bias": {"attention_bias": True},
        "yarn": {"rope_parameters": _YARN},
    },
    "qwen2_moe": {
        "shares-of-one": {"norm_topk_prob": True},
        "no-bias": {"qkv_bias": False},
        "dense-layer": {"mlp_only_layers": [0]},
        "window": {"use_sliding_window": True, "sliding_window": 13},
        "windows-end": {"use_sliding_window": True, "sliding_window": 13, "num_hidden_layers": 3}
        | {"max_window_layers": 2},
    },
    "glm4_moe": {
        "qk-norm": {"use_qk_norm": True, "attention_bias": True},
        "no-dense-layer": {"first_k_dense_replace": 0},
        "dense-layers": {"first_k_dense_replace": 2},
        "shares-as-they-are": {"norm_topk_prob": False, "num_experts_per_tok": 5},
    },
    "minimax_m2": {
        "one-expert": {"num_experts_per_tok": 1},
        "wide-heads": {"head_dim": 40},
        "yarn": {"rope_parameters": _YARN},
    },
    "ministral3": {
        "window": {"sliding_window": 13},
        "not-growing": {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0}},
        "growing-always": {"rope_parameters": _GROWING | {"original_max_position_embeddings": 1}},
    },
}
FAST_CASES = [
    ("llama", "mlp-bias"),
    ("granite", "biases"),
    ("granitemoehybrid", "not-rotated"),
    ("smollm3", "interval"),
    ("seed_oss", "all-biases"),
    ("ernie4_5", "odd-heads"),
    ("glm", "plain"),
    ("glm4", "bf16"),
    ("hunyuan_v1_dense", "plain"),
    ("hunyuan_v1_dense", "odd-heads"),
    ("exaone4", "odd-heads"),
    ("gemma2", "plain"),
    ("ministral3", "plain"),
    ("gpt_oss", "plain"),
    ("olmoe", "odd-heads"),
    ("qwen2_moe", "window"),
    ("glm4_moe", "qk-norm"),
    ("minimax_m2", "plain"),
]
