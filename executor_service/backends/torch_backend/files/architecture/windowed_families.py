"""`WINDOWED`: the families of which models, or some of their layers, may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping

from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.architecture.config_windows import WindowRule
from executor_service.backends.torch_backend.files.architecture.family import BiasRule, Family
from executor_service.backends.torch_backend.files.architecture.family_shared import (
    GATE_UP,
    GEMMA,
    MISTRAL,
    MLP_BIASES,
    NORMS_AFTER,
    NORMS_AROUND,
    OLMO,
    QKV,
    QWEN,
)
from executor_service.backends.torch_backend.files.architecture.rope.from_config import RopeRule
from executor_service.backends.torch_backend.files.architecture.spec import QkNorm

_QWEN_BIASES = BiasRule(qkv=("", True), output=("", False))
_QWEN_WINDOW = WindowRule(size=4096, flagged=True, listed=True, first=28)
_QWEN2_VL = Family(
    sizes={
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
    },
    gguf="qwen2vl",
    window=WindowRule(size=4096, flagged=True, listed=True, first=80),
    biases=_QWEN_BIASES,
    rope=RopeRule(1_000_000.0, sections=True),
    norm_eps=1e-5,
)

WINDOWED: Mapping[str, Family] = {
    "smollm3": Family(
        sizes={
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
        },
        gguf="smollm3",
        window=WindowRule(size=None, flagged=True, listed=True),
        biases=MLP_BIASES,
        rope=RopeRule(2_000_000.0),
        unrotated_every=4,
        tied=True,
        gguf_pairs=True,
    ),
    "exaone4": Family(
        sizes={
            "vocab_size": 102_400,
            "hidden_size": 4096,
            "intermediate_size": 16_384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
        },
        gguf="exaone4",
        fields=frozenset({"sliding_window_pattern"}),
        window=WindowRule(size=4096, listed=True, period=4, only_rotated=True),
        norm_eps=1e-5,
        norms=NORMS_AFTER,
        qk_norm=QkNorm.HEAD,
    ),
    "gemma2": Family(
        sizes=GEMMA | {"vocab_size": 256_000, "max_position_embeddings": 8192},
        gguf="gemma2",
        fields=frozenset({"query_pre_attn_scalar"}),
        window=WindowRule(size=4096, listed=True, period=2),
        norms=NORMS_AROUND,
        norm_offset=1.0,
        activation=("hidden_activation", Activation.GELU),
        caps=(50.0, 30.0),
        scaled_embedding=True,
        tied=True,
    ),
    "mistral": Family(
        sizes=MISTRAL,
        gguf="llama",
        window=WindowRule(size=4096),
    ),
    "ministral3": Family(
        sizes=MISTRAL
        | {
            "vocab_size": 131_072,
            "num_hidden_layers": 34,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
        },
        gguf="mistral3",
        window=WindowRule(size=None),
        rope=RopeRule(
            1_000_000.0,
            grows=True,
            missing={
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        norm_eps=1e-5,
        gguf_pairs=True,
    ),
    "gemma3_text": Family(
        sizes=GEMMA | {"vocab_size": 262_208, "max_position_embeddings": 131_072},
        gguf="gemma3",
        # transformers writes the last one beside `layer_types`, and does not read it.
        fields=frozenset(
            {
                "query_pre_attn_scalar",
                "rope_local_base_freq",
                "sliding_window_pattern",
                "_sliding_window_pattern",
            }
        ),
        window=WindowRule(size=4096, listed=True, period=6, rope_theta=10_000.0),
        rope=RopeRule(1_000_000.0),
        norms=NORMS_AROUND,
        norm_offset=1.0,
        activation=("hidden_activation", Activation.GELU),
        qk_norm=QkNorm.HEAD,
        scaled_embedding=True,
        tied=True,
    ),
    "phi3": Family(
        sizes={
            "vocab_size": 32_064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
        },
        gguf="phi3",
        window=WindowRule(size=None),
        rope=RopeRule(partial=1.0),
        norm_eps=1e-5,
        fused=(QKV, GATE_UP),
    ),
    "olmo3": Family(
        sizes=OLMO,
        gguf="olmo2",
        window=WindowRule(size=4096, listed=True, period=4, rope_theta=500_000.0),
        rope=RopeRule(500_000.0),
        norm_eps=1e-5,
        norms=NORMS_AFTER,
        qk_norm=QkNorm.ALL,
    ),
    "qwen2": Family(sizes=QWEN, gguf="qwen2", window=_QWEN_WINDOW, biases=_QWEN_BIASES),
    "qwen3": Family(sizes=QWEN | {"head_dim": 128}, gguf="qwen3", window=_QWEN_WINDOW, qk_norm=QkNorm.HEAD),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
}
