"""The models that are measured: published shapes as Hugging Face configs, and tiny ones for a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec

_COMMON: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
}


def _qwen3(hidden: int, layers: int, heads: int, inner: int, *, tied: bool) -> dict[str, Any]:
    return _COMMON | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "tie_word_embeddings": tied,
    }


# From the config.json of Qwen/Qwen3-0.6B, -4B, -8B and -30B-A3B; the context is cut, no end of text is named.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12_288, tied=False),
    "Qwen3-30B-A3B": _qwen3(2048, 48, 32, 6144, tied=False)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
_TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def config_of(name: str, *, dry: bool) -> dict[str, Any]:
    """The config.json of one of CONFIGS; dry: of a model of the same kind that takes no time."""
    config = CONFIGS[name]
    if not dry:
        return config
    return config | _TINY | (_TINY_EXPERTS if "num_experts" in config else {})


def spec_of(name: str, *, dry: bool = False) -> ModelSpec:
    """The same as the backend reads it."""
    return spec_from_config(config_of(name, dry=dry), {}, name)


def write_config(name: str, directory: Path, *, dry: bool, layers: int = 0) -> Path:
    """A model directory without weights: `random_weights` makes those; its path. `layers`: 0: all."""
    path = directory / (f"{name}-{layers}" if layers else name)
    path.mkdir(parents=True, exist_ok=True)
    config = config_of(name, dry=dry) | ({"num_hidden_layers": layers} if layers else {})
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def linears(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The sizes [n, k] of the weights of a dense model's layer by name, and of its output layer `head`."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "qkv": (queries + 2 * keys, spec.hidden_size),
        "output": (spec.hidden_size, queries),
        "head": (spec.vocab_size, spec.hidden_size),
    }
