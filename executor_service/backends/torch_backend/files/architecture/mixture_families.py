"""`MIXTURES`: the families whose layers are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping

from executor_service.backends.torch_backend.files.architecture.config_windows import WindowRule
from executor_service.backends.torch_backend.files.architecture.family import BiasRule, Family, MixtureRule
from executor_service.backends.torch_backend.files.architecture.family_shared import MISTRAL, OLMO, QWEN
from executor_service.backends.torch_backend.files.architecture.rope.from_config import RopeRule
from executor_service.backends.torch_backend.files.architecture.spec import QkNorm

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
        gguf="",
        norm_eps=1e-5,
        qk_norm=QkNorm.ALL,
        mixture=MixtureRule(64, 8, "intermediate_size", scaled=True),
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
        gguf="",
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
        mixture=MixtureRule(128, 8, "moe_intermediate_size", chosen=True, scaled=True),
    ),
}
