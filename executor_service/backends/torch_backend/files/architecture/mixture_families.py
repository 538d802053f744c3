"""`MIXTURES`: the families whose layers are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping

from executor_service.backends.torch_backend.files.architecture.config_windows import WindowRule
from executor_service.backends.torch_backend.files.architecture.family import BiasRule, Family, MixtureRule
from executor_service.backends.torch_backend.files.architecture.family_shared import (
    GLM_ENDS,
    MISTRAL,
    OLMO,
    POST_NORM,
    QWEN,
)
from executor_service.backends.torch_backend.files.architecture.rope.from_config import RopeRule
from executor_service.backends.torch_backend.files.architecture.spec import QkNorm

_DRAFT_LAYERS = frozenset(
    {"mtp_transformer_layers", "num_mtp_layers", "num_mtp_modules", "num_nextn_predict_layers", "use_mtp"}
)
"""Fields about layers after the last one, which draft tokens and are not loaded."""
_MINIMAX_LAYERS = ("full_attention", "linear_attention", "mlp")

MIXTURES: Mapping[str, Family] = {
    "mixtral": Family(
        sizes=MISTRAL,
        gguf="llama",
        window=WindowRule(size=None),
        rope=RopeRule(1_000_000.0),
        norm_eps=1e-5,
        mixture=MixtureRule(8, 2, "intermediate_size"),
        renamed=(
            ("mlp.", "block_sparse_moe."),
            ("gate_proj", "w1"),
            ("up_proj", "w3"),
            ("down_proj", "w2"),
        ),
        gguf_pairs=True,
    ),
    "olmoe": Family(
        sizes=OLMO
        | {"hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16}
        | {"num_attention_heads": 16, "max_position_embeddings": 4096},
        gguf="olmoe",
        norm_eps=1e-5,
        qk_norm=QkNorm.ALL,
        mixture=MixtureRule(64, 8, "intermediate_size", scaled=False, gguf_scaled=False),
    ),
    "gpt_oss": Family(
        sizes={
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
        },
        gguf="gpt-oss",
        gguf_ends=("<|endoftext|>", "<|call|>"),
        gguf_renamed=POST_NORM,
        fields=frozenset({"initial_context_length", "swiglu_limit"}),
        window=WindowRule(size=128, listed=True, period=2),
        biases=BiasRule(qkv=("attention_bias", True), output=("attention_bias", True)),
        rope=RopeRule(
            150_000.0,
            missing={
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        ),
        norm_eps=1e-5,
        mixture=MixtureRule(128, 4, "intermediate_size", clamped=True),
        sinks=True,
        renamed=(("mlp.gate.", "mlp.router."),),
    ),
    "qwen3_moe": Family(
        sizes=QWEN
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
        },
        gguf="qwen3moe",
        window=WindowRule(size=4096, flagged=True),
        qk_norm=QkNorm.HEAD,
        mixture=MixtureRule(128, 8, "moe_intermediate_size", chosen=True, scaled=False),
    ),
    "qwen2_moe": Family(
        sizes=QWEN
        | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
        | {"num_attention_heads": 16, "num_key_value_heads": 16}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        gguf="qwen2moe",
        window=WindowRule(size=4096, flagged=True, listed=True, last=28, period=2),
        biases=BiasRule(qkv=("qkv_bias", True), output=("", False)),
        mixture=MixtureRule(
            60,
            4,
            "moe_intermediate_size",
            chosen=True,
            scaled=False,
            gguf_scaled=False,
            shared_size="shared_expert_intermediate_size",
            shared_gate=True,
        ),
    ),
    "glm4_moe": Family(
        sizes={
            "vocab_size": 151_552,
            "hidden_size": 4096,
            "intermediate_size": 10_944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
        },
        gguf="glm4moe",
        gguf_ends=GLM_ENDS,
        gguf_renamed=POST_NORM,
        fields=_DRAFT_LAYERS,
        biases=BiasRule(output=("", False)),
        rope=RopeRule(partial=0.5),
        norm_eps=1e-5,
        qk_norm=QkNorm.HEAD,
        qk_norm_flagged=True,
        mixture=MixtureRule(
            128,
            8,
            "moe_intermediate_size",
            counts=("n_routed_experts",),
            dense_first=1,
            scaled=True,
            gguf_scaled=False,
            corrected=True,
            shared_count="n_shared_experts",
        ),
        renamed=(("mlp.shared_expert.", "mlp.shared_experts."),),
    ),
    "minimax_m2": Family(
        sizes={
            "vocab_size": 200_064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196_608,
        },
        gguf="minimax-m2",
        fields=_DRAFT_LAYERS | {"mlp_intermediate_size", "rotary_dim", "shared_moe_mode"},
        expected={
            "qk_norm_type": ("per_layer",),
            "shared_intermediate_size": (0,),
            **dict.fromkeys((f"layernorm_{part}_beta" for part in _MINIMAX_LAYERS), (1,)),
        },
        biases=BiasRule(qkv=("", False), output=("", False)),
        rope=RopeRule(5_000_000.0, partial=1.0),
        qk_norm=QkNorm.ALL,
        mixture=MixtureRule(256, 8, "intermediate_size", corrected=True),
        renamed=(
            ("mlp.gate.e_score", "block_sparse_moe.e_score"),
            ("mlp.", "block_sparse_moe."),
            ("gate_proj", "w1"),
            ("up_proj", "w3"),
            ("down_proj", "w2"),
        ),
    ),
}
