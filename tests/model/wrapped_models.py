"""Tiny random models that take images as well, with a text model inside, saved by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Mistral3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
)

from tests.model.tiny import randomize

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
}
_ODD = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 108, "intermediate_size": 52}
_ALTERNATING = ["sliding_attention", "full_attention"]
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_TOWER = {"depth": 1, "num_heads": 2, "patch_size": 4, "hidden_size": 16, "intermediate_size": 24}
_QWEN_IDS = {
    "image_token_id": 201,
    "video_token_id": 202,
    "vision_start_token_id": 203,
    "vision_end_token_id": 204,
}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}
_MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 2, 2]}


def _gemma3(text: dict[str, Any]) -> PretrainedConfig:
    own = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 13, "layer_types": _ALTERNATING}
    return Gemma3Config(
        text_config=_SIZES | own | text, vision_config=_TOWER, mm_tokens_per_image=4, image_token_index=201
    )


def _mistral3(text: dict[str, Any]) -> PretrainedConfig:
    own = {"model_type": "mistral", "head_dim": 12, "sliding_window": None}
    tied = text.get("tie_word_embeddings", False)
    return Mistral3Config(
        text_config=_SIZES | own | text,
        vision_config=_TOWER | {"model_type": "pixtral", "head_dim": 8},
        image_token_index=201,
        tie_word_embeddings=tied,
    )


def _qwen(kind: Callable[..., PretrainedConfig], tower: dict[str, Any]) -> Any:
    def config(text: dict[str, Any]) -> PretrainedConfig:
        inside = _SIZES | {"head_dim": 12, "rope_parameters": _MROPE} | text
        return kind(
            text_config=inside,
            vision_config=_QWEN_TOWER | tower,
            tie_word_embeddings=text.get("tie_word_embeddings", False),
            **_QWEN_IDS,
        )

    return config


_CONFIGS: dict[str, Callable[[dict[str, Any]], PretrainedConfig]] = {
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "qwen2_vl": _qwen(Qwen2VLConfig, {"embed_dim": 16, "hidden_size": 72}),
    "qwen2_5_vl": _qwen(Qwen2_5_VLConfig, {"out_hidden_size": 72, "fullatt_block_indexes": [0]}),
    "qwen3_vl": _qwen(Qwen3VLConfig, {"out_hidden_size": 72, "deepstack_visual_indexes": [0]}),
}
_COMMON: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd-heads": _ODD,
    "one-kv-head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "sharded": {},
    "bf16": {},
}
_LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
_OWN: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3": {
        "long-context": {
            "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": {"rope_theta": 50.0}}
        },
    },
    "mistral3": {
        "window": {"sliding_window": 13},
        "wide-heads": {"head_dim": 40},
        "ministral3": {"model_type": "ministral3", "rope_parameters": _GROWING},
    },
    "qwen2_vl": {},
    "qwen2_5_vl": {
        "window": {"use_sliding_window": True, "sliding_window": 13, "layer_types": _ALTERNATING[::-1]}
    },
    "qwen3_vl": {
        "bias": {"attention_bias": True},
        "uneven-sections": {"rope_parameters": _MROPE | {"mrope_section": [3, 2, 1]}},
    },
}
VARIANTS = {kind: _COMMON | _OWN[kind] for kind in _CONFIGS}
CASES = [(kind, variant) for kind in VARIANTS for variant in VARIANTS[kind]]
FAST_CASES = [
    ("gemma3", "long-context"),
    ("mistral3", "plain"),
    ("mistral3", "ministral3"),
    ("qwen2_5_vl", "odd-heads"),
    ("qwen3_vl", "uneven-sections"),
]
"""Of which every run of the tests tries these."""


def config_of(kind: str, variant: str = "plain") -> PretrainedConfig:
    """The configuration of one model."""
    return _CONFIGS[kind](VARIANTS[kind][variant])


def save_wrapped(kind: str, variant: str, path: Path) -> PreTrainedModel:
    """Write the model to `path` and return transformers' own of it, in fp32."""
    config = config_of(kind, variant)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomize(model)
    if variant == "bf16":
        model = model.bfloat16()
    model.save_pretrained(path, **({"max_shard_size": "60KB"} if variant == "sharded" else {}))
    if variant != "bf16":
        return model.eval()
    return AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
