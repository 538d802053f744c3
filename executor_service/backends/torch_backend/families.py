"""`FAMILIES`: what all models of an architecture have in common, and their files need not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from executor_service.backends.torch_backend.config_windows import WindowRule


@dataclass(frozen=True, slots=True)
class Family:
    """The models of one architecture."""

    sizes: Mapping[str, int]  # config.json's fields and their defaults in transformers 5
    gguf: str = ""  # `general.architecture` of GGUF files; "": they have another family's
    window: WindowRule | None = None
    qkv_bias: bool = False  # always, whatever `attention_bias` is
    qk_norm: bool = False
    mixture: bool = False  # of experts


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
    ),
    "mistral": Family(
        sizes=_MISTRAL,
        window=WindowRule(size=4096),
    ),
    "qwen2": Family(sizes=_QWEN, gguf="qwen2", window=_QWEN_WINDOW, qkv_bias=True),
    "qwen3": Family(sizes=_QWEN | {"head_dim": 128}, gguf="qwen3", window=_QWEN_WINDOW, qk_norm=True),
    "qwen3_moe": Family(
        sizes=_QWEN
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
        },
        gguf="qwen3moe",
        window=WindowRule(size=4096, flagged=True),
        qk_norm=True,
        mixture=True,
    ),
}
"""By `model_type` of config.json, which `ModelSpec.architecture` is as well."""
