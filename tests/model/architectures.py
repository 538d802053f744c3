"""Tiny random models of the architectures beside Llama and Qwen, in many shapes, saved by transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
)

from tests.model import newer_architectures as newer
from tests.model.tiny import save_random

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_ODD = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 108, "intermediate_size": 52}
_COMMON: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd-heads": _ODD,
    "one-kv-head": {"num_key_value_heads": 1},
    "multi-head": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    "sharded": {},
    "bf16": {},
}
_LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
_FACTORS = [1.0, 1.3, 1.7]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": _FACTORS,
    "long_factor": [4 * factor for factor in _FACTORS],
    "partial_rotary_factor": 0.5,
}
_OWN: dict[str, dict[str, dict[str, Any]]] = {
    "mistral": {
        "no-window": {"sliding_window": None},
        "window-of-one": {"sliding_window": 1},
        "wide-heads": {"head_dim": 40},
        "linear-rope": {"rope_parameters": _LINEAR},
    },
    "gemma3": {
        "bias": {"attention_bias": True},
        "windows-alone": {"layer_types": ["sliding_attention"] * 2},
        "no-window": {"layer_types": ["full_attention"] * 2},
        "wide-heads": {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
        "long-context": {
            "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": {"rope_theta": 50.0}}
        },
    },
    "phi3": {
        "window": {"sliding_window": 9},
        "partial-rotary": {"rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5}},
        "longrope": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
    },
    "olmo2": {"bias": {"attention_bias": True}, "linear-rope": {"rope_parameters": _LINEAR}},
    "olmo3": {
        "bias": {"attention_bias": True},
        "windows-alone": {"layer_types": ["sliding_attention"] * 2},
        "two-ropes": {
            "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": {"rope_theta": 50.0}}
        },
    },
    "mixtral": {
        "window": {"sliding_window": 9},
        "one-expert": {"num_experts_per_tok": 1},
        "all-experts": {"num_experts_per_tok": 4, "num_local_experts": 4},
    },
    **newer.OWN,
}
_CLASSES: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    "mistral": (MistralConfig, {"sliding_window": 13}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": (Phi3Config, {}),
    "olmo2": (Olmo2Config, {}),
    "olmo3": (
        Olmo3Config,
        {"sliding_window": 13, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 5}),
    **newer.CLASSES,
}
ARCHITECTURES = tuple(_CLASSES)
VARIANTS: Mapping[str, Mapping[str, dict[str, Any]]] = {name: _COMMON | _OWN[name] for name in ARCHITECTURES}
CASES = [(architecture, variant) for architecture in ARCHITECTURES for variant in VARIANTS[architecture]]
FAST_CASES = [
    ("mistral", "tied"),
    ("mistral", "odd-heads"),
    ("gemma3", "one-kv-head"),
    ("gemma3", "long-context"),
    ("phi3", "odd-heads"),
    ("phi3", "partial-rotary"),
    ("olmo2", "odd-heads"),
    ("olmo2", "bias"),
    ("olmo3", "two-ropes"),
    ("mixtral", "window"),
    ("mixtral", "sharded"),
    *newer.FAST_CASES,
]
"""Of which every run of the tests tries these."""


def config_of(architecture: str, variant: str, **changes: Any) -> PretrainedConfig:
    """The configuration of one model."""
    kind, sizes = _CLASSES[architecture]
    return kind(**_SIZES | sizes | VARIANTS[architecture][variant] | changes)


def save_variant(architecture: str, variant: str, path: Path) -> PreTrainedModel:
    """Write the model to `path` and return transformers' own of it, in fp32."""
    shards = {"max_shard_size": "60KB"} if variant == "sharded" else {}
    model = save_random(config_of(architecture, variant), path, **shards)
    if variant != "bf16":
        return model
    model.bfloat16().save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
