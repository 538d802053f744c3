"""`FAMILIES`: what all models of an architecture have in common, and their files need not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.architecture.config_windows import WindowRule
from executor_service.backends.torch_backend.files.architecture.spec import NormNames, QkNorm

_NORMS = NormNames()


@dataclass(frozen=True, slots=True)
class MixtureRule:
    """How config.json describes a mixture of experts."""

    experts: int  # defaults
    experts_per_token: int
    size_field: str  # of the size of an expert
    chosen: bool = False  # it says which layers are mixtures, and whether shares are scaled to a sum of 1


@dataclass(frozen=True, slots=True)
class Family:
    """The models of one architecture."""

    sizes: Mapping[str, int]  # config.json's fields and their defaults in transformers 5
    gguf: str  # `general.architecture` of GGUF files
    fields: frozenset[str] = frozenset()  # that it has beside those of all, some in `config_fields.NEUTRAL`
    window: WindowRule | None = None
    qkv_bias: bool = False  # always, whatever `attention_bias` is
    rope_theta: float = 10_000.0  # default
    partial_rotary: bool = False  # `partial_rotary_factor` may be below 1
    norm_eps: float = 1e-6  # default of `rms_norm_eps`
    norms: NormNames = _NORMS
    norm_offset: float = 0.0  # of safetensors files; GGUF files have it in the weights
    activation: tuple[str, Activation] = ("hidden_act", Activation.SILU)  # config.json's field
    qk_norm: QkNorm = QkNorm.NONE
    tied: bool = False  # default of `tie_word_embeddings`
    scaled_embedding: bool = False  # by the square root of the hidden size
    mixture: MixtureRule | None = None
    fused: bool = False  # q, k and v are in one tensor, gate and up in another
    renamed: tuple[tuple[str, str], ...] = ()  # parts of our tensors' names, and the files' for them
    gguf_pairs: bool = False  # GGUF files have the rows of q and k that are rotated together side by side


_QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
_MISTRAL = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_OLMO = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_NORMS_AFTER = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_QWEN_WINDOW = WindowRule(size=4096, flagged=True, listed=True, first=28)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        sizes={
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
        gguf="llama",
        gguf_pairs=True,
    ),
    "mistral": Family(
        sizes=_MISTRAL,
        gguf="llama",
        window=WindowRule(size=4096),
    ),
    "gemma3_text": Family(
        sizes={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
        },
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
        rope_theta=1_000_000.0,
        norms=NormNames(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
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
        partial_rotary=True,
        norm_eps=1e-5,
        fused=True,
    ),
    "olmo2": Family(sizes=_OLMO, gguf="olmo2", norm_eps=1e-5, norms=_NORMS_AFTER, qk_norm=QkNorm.ALL),
    "olmo3": Family(
        sizes=_OLMO,
        gguf="olmo2",
        window=WindowRule(size=4096, listed=True, period=4, rope_theta=500_000.0),
        rope_theta=500_000.0,
        norm_eps=1e-5,
        norms=_NORMS_AFTER,
        qk_norm=QkNorm.ALL,
    ),
    "mixtral": Family(
        sizes=_MISTRAL,
        gguf="llama",
        window=WindowRule(size=None),
        rope_theta=1_000_000.0,
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
    "qwen2": Family(sizes=_QWEN, gguf="qwen2", window=_QWEN_WINDOW, qkv_bias=True),
    "qwen3": Family(sizes=_QWEN | {"head_dim": 128}, gguf="qwen3", window=_QWEN_WINDOW, qk_norm=QkNorm.HEAD),
    "qwen3_moe": Family(
        sizes=_QWEN
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
        mixture=MixtureRule(128, 8, "moe_intermediate_size", chosen=True),
    ),
}
"""By `model_type` of config.json, which `ModelSpec.architecture` is as well."""
