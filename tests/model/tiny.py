"""Tiny random models of every family, saved the way Hugging Face saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
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
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from tests.model.newer_architectures import GRANITE_HYBRID

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_LOCAL_GLOBAL = ["sliding_attention", "sliding_attention", "full_attention"]
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-untied-bias": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False, attention_bias=True),
    "llama3-rope": lambda: LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
    "llama-linear-rope": lambda: LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "llama-heads": lambda: LlamaConfig(
        **(_SIZES | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}), head_dim=10
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES, head_dim=24, query_pre_attn_scalar=20, sliding_window=21, layer_types=_LOCAL_LOCAL_GLOBAL
    ),
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=24, tie_word_embeddings=True),
    "qwen3-moe": lambda: Qwen3MoeConfig(  # type: ignore[call-arg]  # its base class takes head_dim
        **_SIZES,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
    ),
    "qwen3-moe-mixed": lambda: Qwen3MoeConfig(  # type: ignore[call-arg]  # its base class takes head_dim
        **_SIZES,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    ),
}
MORE_CONFIGS: dict[str, Any] = {
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=21),
    "qwen3-windows": lambda: Qwen3Config(
        **_SIZES, head_dim=24, use_sliding_window=True, sliding_window=19, max_window_layers=1
    ),
    "phi3": lambda: Phi3Config(
        **_SIZES, rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    ),
    "olmo2": lambda: Olmo2Config(**_SIZES),
    "olmo3": lambda: Olmo3Config(**_SIZES, sliding_window=19, layer_types=_LOCAL_LOCAL_GLOBAL),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=5),
}
"""Those of architectures that `test_architectures.py` tries in many shapes."""
ALL_CONFIGS = CONFIGS | MORE_CONFIGS
NEWER_CONFIGS: dict[str, Any] = {
    "granite": lambda: GraniteConfig(**_SIZES),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **_SIZES, **GRANITE_HYBRID | {"layer_types": ["attention"] * 3}
    ),
    "smollm3": lambda: SmolLM3Config(**_SIZES, no_rope_layers=[1, 0, 1]),
    "seed_oss": lambda: SeedOssConfig(**_SIZES, head_dim=16),
    "ernie4_5": lambda: Ernie4_5Config(**_SIZES, head_dim=16),
    "glm": lambda: GlmConfig(**_SIZES, head_dim=16),
    "glm4": lambda: Glm4Config(**_SIZES, head_dim=16),
    "hunyuan_v1_dense": lambda: HunYuanDenseV1Config(
        **_SIZES,
        head_dim=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 1000.0, "factor": 1.0},
    ),
    "exaone4": lambda: Exaone4Config(**_SIZES, sliding_window=19, layer_types=_LOCAL_LOCAL_GLOBAL),
    "gpt_oss": lambda: GptOssConfig(**_SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: OlmoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_SIZES, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=48
    ),
    "glm4_moe": lambda: Glm4MoeConfig(**_SIZES, **_EXPERTS, n_routed_experts=4),
    "minimax_m2": lambda: MiniMaxM2Config(**_SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "ministral3": lambda: Ministral3Config(**_SIZES, head_dim=16),
    "gemma2": lambda: Gemma2Config(**_SIZES, head_dim=16, sliding_window=19, layer_types=_LOCAL_LOCAL_GLOBAL),
}
"""Those of `newer_architectures.py`."""


def save(name: str, path: Path, **options: Any) -> PreTrainedModel:
    """Write a random model of this kind to `path` and return transformers' own of it."""
    return save_random((ALL_CONFIGS | NEWER_CONFIGS)[name](), path, **options)


def save_random(
    config: PretrainedConfig, path: Path, *, attention: str = "eager", **options: Any
) -> PreTrainedModel:
    """Write a random model of this config to `path` and return transformers' own of it."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    randomize(model)
    model.save_pretrained(path, **options)
    return model.eval()


def randomize(model: PreTrainedModel) -> None:
    """Give a model other weights than those that it begins with."""
    kind = model.config.model_type
    mean = 0.0 if kind.startswith("gemma") else 1.0  # of vectors; Gemma adds 1 to its norms'
    for parameter in model.parameters():  # defaults leave logits so flat that errors would hide
        torch.nn.init.normal_(parameter, std=0.08) if parameter.ndim > 1 else torch.nn.init.normal_(
            parameter, mean, 0.1
        )
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
