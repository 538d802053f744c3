"""What a config.json leaves out is what transformers takes for it, family by family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.model.test_config_fields import assert_equal_to_transformers

CLASSES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "gemma3_text": Gemma3TextConfig,
    "phi3": Phi3Config,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "mixtral": MixtralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    **dict.fromkeys(TOKENS, 0),  # some classes' lie above the vocabulary
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
HIDDEN_HEADS = {key: value for key, value in SIZES.items() if key != "head_dim"}
FAMILIES = {
    "llama": SIZES,
    "mistral": SIZES | {"sliding_window": 9},
    "gemma3_text": SIZES | WINDOWS | {"query_pre_attn_scalar": 8},
    "phi3": HIDDEN_HEADS,
    "olmo2": HIDDEN_HEADS,
    "olmo3": HIDDEN_HEADS | WINDOWS,
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": SIZES,
    "qwen3": SIZES,
    "qwen3_moe": SIZES | EXPERTS,
}
# A number of KV heads that is the class's, not the number of heads, needs more heads; and so on.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("mistral", "num_key_value_heads"): {"num_attention_heads": 16},
    ("gemma3_text", "num_hidden_layers"): {"layer_types": None},
    ("olmo3", "num_hidden_layers"): {"layer_types": None},
    ("mixtral", "num_key_value_heads"): {"num_attention_heads": 16},
    ("mixtral", "num_experts_per_tok"): {"num_local_experts": 9},
    ("qwen2", "num_key_value_heads"): {"num_attention_heads": 64, "hidden_size": 64, "head_dim": 2},
    ("qwen3", "num_key_value_heads"): {"num_attention_heads": 64, "hidden_size": 64, "head_dim": 2},
    ("qwen3_moe", "num_experts_per_tok"): {"num_experts": 9},
    ("qwen3_moe", "head_dim"): {"hidden_size": 64},
    **{(family, "num_attention_heads"): {"hidden_size": 64} for family in ("phi3", "olmo2", "olmo3")},
}
FIELDS = [
    *(name for name in SIZES if name not in TOKENS),
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
    "attention_bias",
]
OWN_FIELDS = {
    "gemma3_text": [*WINDOWS, "query_pre_attn_scalar", "hidden_activation"],
    "phi3": ["original_max_position_embeddings"],
    "olmo3": [*WINDOWS],
    "mixtral": ["num_local_experts", "num_experts_per_tok"],
    "qwen3_moe": [*EXPERTS, "decoder_sparse_step", "mlp_only_layers"],
}
FAST = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
CASES = [
    pytest.param(family, field, marks=[] if family in FAST else pytest.mark.slow)
    for family, sizes in FAMILIES.items()
    for field in [*FIELDS, *OWN_FIELDS.get(family, ())]
    if field != "head_dim" or field in sizes
]


@pytest.mark.parametrize(("family", "field"), CASES)
def test_a_missing_field_is_transformers_default(family: str, field: str, tmp_path: Path) -> None:
    values = FAMILIES[family] | BESIDE.get((family, field), {})
    write(CLASSES[family](**{k: v for k, v in values.items() if k != field}), tmp_path, without=field)
    assert_equal_to_transformers(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_window_of_a_config_without_one_is_transformers_default(family: str) -> None:
    used = {"model_type": family, "use_sliding_window": family.startswith("qwen") or None}
    window = spec_from_config(used, {}, family).window
    theirs = CLASSES[family](**{key: value for key, value in used.items() if key != "model_type" and value})
    assert (window.size if window else None) == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_null_kv_heads_are_as_many_as_heads(family: str, tmp_path: Path) -> None:
    write(CLASSES[family](**SIZES | {"num_key_value_heads": None}), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_key_value_heads": None}))
    assert open_checkpoint(tmp_path).spec.kv_heads == 8
    assert_equal_to_transformers(tmp_path)


def write(config: Any, path: Path, without: str = "") -> None:
    """Save a random model whose config.json lacks a field."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)
    file = path / "config.json"
    found = json.loads(file.read_text())
    both = ("num_experts", "num_local_experts")
    for name in both if without in both else (without,):
        found.pop(name, None)
    file.write_text(json.dumps(found))
