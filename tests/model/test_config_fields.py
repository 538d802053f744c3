"""A field of config.json that changes what a model computes is refused by name, or means what it does in
transformers: no model is served that answers otherwise than its files say."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.model.driver import Driver, logits_of, pages_from
from tests.model.tiny import save

PAGE, TOKENS = 16, np.random.default_rng(2).integers(3, 211, 67).tolist()
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, "long_factor": [1.5] * 8, "short_factor": [1.25] * 8}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("hunyuan_v1_dense", {"use_cla": True}),
    ("hunyuan_v1_dense", {"use_qk_norm": False}),
    ("hunyuan_v1_dense", {"attention_head_dim": 8}),
    ("hunyuan_v1_dense", {"rope_parameters": ALPHA | {"factor": 2.0}}),
    ("hunyuan_v1_dense", {"rope_parameters": ALPHA | {"alpha": -1.0}}),
    ("hunyuan_v1_dense", {"rope_parameters": ALPHA | {"rope_type": "default"}}),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
    ("llama", {"rope_parameters": ALPHA}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"hidden_activation": "gelu_pytorch_tanh"}),
    ("llama", {"activation_function": "relu"}),
    ("llama", {"norm_type": "layer_norm"}),
    ("llama", {"add_unit_offset": True}),
    ("llama", {"zero_centered_gamma": True}),
    ("llama", {"embedding_multiplier": 12.0}),
    ("llama", {"residual_multiplier": 0.22}),
    ("llama", {"attention_multiplier": 0.0078125}),
    ("llama", {"logits_scaling": 8.0}),
    ("llama", {"logit_scale": 0.0625}),
    ("llama", {"lm_head_multiplier": 0.5}),
    ("llama", {"key_multiplier": 0.5}),
    ("llama", {"scale_emb": 12}),
    ("llama", {"scale_depth": 1.4}),
    ("llama", {"dim_model_base": 256}),
    ("llama", {"embedding_scale": 2.0}),
    ("llama", {"scale_embedding": True}),
    ("llama", {"query_pre_attn_scalar": 224}),
    ("llama", {"softmax_scale": 0.5}),
    ("llama", {"attn_temperature_tuning": True}),
    ("llama", {"use_logn_attn": True}),
    ("llama", {"attn_logit_softcapping": 50.0}),
    ("llama", {"final_logit_softcapping": 30.0}),
    ("qwen3-moe", {"router_logit_softcapping": 30.0}),
    ("llama", {"clip_qkv": 8.0}),
    ("qwen3-moe", {"swiglu_limit": 7.0}),
    ("llama", {"lm_head_bias": True}),
    ("llama", {"use_bias": True}),
    ("llama", {"qkv_bias": True}),
    ("qwen2", {"qkv_bias": False}),
    ("llama", {"qk_norm": True}),
    ("llama", {"use_qk_norm": True}),
    ("qwen3", {"use_qk_norm": False}),
    ("llama", {"is_causal": False}),
    ("llama", {"is_encoder_decoder": True}),
    ("llama", {"add_cross_attention": True}),
    ("llama", {"use_bidirectional_attention": True}),
    ("llama", {"attention_chunk_size": 16}),
    ("llama", {"cross_attention_layers": [1]}),
    ("llama", {"attn_output_gate": True}),
    ("llama", {"alibi": True}),
    ("llama", {"position_embedding_type": "alibi"}),
    ("llama", {"rope_interleaved": True}),
    ("qwen2", {"use_mrope": True}),
    ("llama", {"use_dynamic_ntk": True}),
    ("llama", {"rotary_pct": 0.25}),
    ("llama", {"rotary_dim": 8}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("llama", {"rope_parameters": {"rope_type": "ntk", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 4.0}}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}}),
    ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}),
    ("llama", {"rope_parameters": LONGROPE | {"long_factor": [1.0] * 7}}),
    ("llama", {"rope_parameters": LONGROPE | {"short_factor": [0.0] * 8}}),
    ("llama", {"rope_parameters": LONGROPE | {"long_mscale": 1.2}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 2.0}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 1e9}}),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "factor": 4.0}}),
    ("llama", {"rope_parameters": LLAMA3 | {"beta_fast": 16.0}}),
    ("llama", {"no_rope_layers": [1, 1, 0]}),
    ("llama", {"use_parallel_residual": True}),
    ("llama", {"parallel_attn": True}),
    ("llama", {"num_kv_shared_layers": 1}),
    ("llama", {"q_lora_rank": 8}),
    ("llama", {"kv_lora_rank": 8}),
    ("llama", {"v_head_dim": 8}),
    ("llama", {"pruned_heads": {"0": [1]}}),
    ("llama", {"per_layer_config": {"0": {"intermediate_size": 40}}}),
    ("llama", {"num_local_experts": 8}),
    ("qwen3", {"num_experts": 8}),
    ("qwen3-moe", {"num_experts": 4, "num_local_experts": 8}),
    ("qwen3-moe", {"num_shared_experts": 1}),
    ("qwen3-moe", {"shared_expert_intermediate_size": 40}),
    ("qwen3-moe", {"n_group": 4}),
    ("qwen3-moe", {"routed_scaling_factor": 2.5}),
    ("qwen3-moe", {"scoring_func": "sigmoid"}),
    ("qwen3-moe", {"use_expert_bias": True}),
    ("qwen3-moe", {"first_k_dense_replace": 1}),
    ("llama", {"a_field_of_next_year": 1}),
    ("llama", {"num_experts_per_tok": 2}),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}),
    ("llama", {"vision_config": {"hidden_size": 8}}),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}),
    ("qwen2", {"layer_types": "full_attention"}),
    ("qwen2", {"layer_types": ["full_attention"]}),
    ("qwen2", {"layer_types": None, "use_sliding_window": True, "max_window_layers": -1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 0}),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 3}),
    ("llama", {"use_sliding_window": True, "sliding_window": 8}),
    ("mistral", {"sliding_window": True}),
    ("mistral", {"layer_types": ["full_attention"] * 3}),
    ("llama", {"sliding_window": 8}),
    ("llama", {"model_type": ["llama"]}),
    ("glm4_moe", {"n_group": 2}),
    ("glm4_moe", {"scoring_func": "softmax"}),
    ("glm4_moe", {"first_k_dense_replace": -1}),
    ("minimax_m2", {"rotary_dim": 17}),
    ("minimax_m2", {"attn_type_list": [1, 0, 1]}),
    ("minimax_m2", {"qk_norm_type": "per_head"}),
    ("minimax_m2", {"layernorm_mlp_beta": 3.5}),
    ("minimax_m2", {"shared_intermediate_size": 40}),
    ("minimax_m2", {"use_routing_bias": False}),
]

EQUAL: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"sliding_window": 8, "use_sliding_window": False}),
    ("llama", {"hidden_act": "swish"}),
    ("llama", {"quantization_config": None}),
    ("llama", {"pretraining_tp": 2, "attention_dropout": 0.5, "use_cache": False, "torch_dtype": "float32"}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),  # beside rope_parameters, which it beats
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": None, "mscale": 0}}),
    ("llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 8}}),
    ("llama", {"original_max_position_embeddings": 64}),  # beside a rope type that does not use it
    ("llama", {"rope_parameters": LLAMA3, "original_max_position_embeddings": 32}),
    (
        "llama",
        {
            "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64},
            "original_max_position_embeddings": 32,
        },
    ),
    ("llama", {"rope_parameters": None, "rope_theta": 500.0}),
    ("llama", {"logit_scale": 1.0, "clip_qkv": None, "num_experts": 0, "rope_interleaved": False}),
    ("qwen2", {"attention_bias": True}),  # its biases are where they always are
    ("qwen2", {"layer_types": None, "use_sliding_window": True, "sliding_window": 8}),  # from layer 28 on
    ("qwen2", {"layer_types": None, "use_sliding_window": True, "sliding_window": 600}),
    ("qwen3", {"layer_types": ["full_attention"] * 3, "use_sliding_window": True, "max_window_layers": 0}),
    ("qwen3", {"use_qk_norm": True, "use_sliding_window": False, "sliding_window": 8}),
    ("qwen2", {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    (
        "qwen3",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 13,
        },
    ),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": None}),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 99}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"use_sliding_window": False}),  # not a field of its
    ("qwen3-moe", {"n_group": 1, "routed_scaling_factor": 1.0, "scoring_func": "softmax"}),
    (
        "qwen2_moe",
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2},
    ),
    (
        "glm4_moe",
        {"num_nextn_predict_layers": 2, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1},
    ),
    ("minimax_m2", {"rope_parameters": None, "rope_theta": 5000.0, "rotary_dim": 8}),
    ("minimax_m2", {"attn_type_list": [1, 1, 1], "use_qk_norm": True, "qk_norm_type": "per_layer"}),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a random model of a family, which is made once."""

    @functools.cache
    def directory(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        save(name, path)
        return path

    return directory


def changed(model: Path, changes: dict[str, Any], path: Path) -> Path:
    """The same model whose config.json has these fields."""
    for file in model.iterdir():
        if file.name != "config.json":
            (path / file.name).symlink_to(file)
    (path / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | changes))
    return path


def case_name(value: object) -> str:
    return ", ".join(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("name", "changes"), REFUSED, ids=case_name)
def test_a_field_that_changes_the_result_is_refused_by_name(
    name: str, changes: dict[str, Any], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(changed(saved(name), changes, tmp_path))
    assert any(field in str(caught.value) for field in changes)


@pytest.mark.parametrize(("name", "changes"), EQUAL, ids=case_name)
def test_a_field_that_is_accepted_means_what_it_does_in_transformers(
    name: str, changes: dict[str, Any], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    assert_equal_to_transformers(changed(saved(name), changes, tmp_path))


def assert_equal_to_transformers(path: Path) -> None:
    """Our logits of a directory are those of transformers' own reading of it."""
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    ours = TorchBackend(TorchConfig(path, threads=1))
    ours.load(lambda what, done: None)
    ours.allocate(16, PAGE)
    vocab_size = theirs.config.vocab_size
    tokens = [token % vocab_size for token in TOKENS]
    [out] = ours.forward([Driver(pages_from(1), PAGE).feed(tokens, outputs=len(tokens))])
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(expected).max() > 0.1  # flat logits would prove nothing
    assert np.abs(logits_of(out) - expected).max() < 1e-4 * max(1, np.abs(expected).max())
    ours.close()
