"""A GGUF key that changes what a model computes is supported, or refused by name: none is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.architecture.gguf_spec import spec_from_gguf
from executor_service.backends.torch_backend.files.architecture.rope.spec import LinearScaling, RopeSpec
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.unit.executor.model_files import refuses, write_gguf

CHANGES = {
    "logit_scale": 0.0625,
    "residual_scale": 0.22,
    "embedding_scale": 12.0,
    "attention.scale": 0.5,
    "attention.output_scale": 0.5,
    "attention.temperature_scale": 0.1,
    "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0,
    "attention.causal": False,
    "attention.sliding_window": 16,
    "attention.value_length": 4,
    "attention.shared_kv_layers": 1,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "router_logit_softcapping": 30.0,
    "use_parallel_residual": True,
    "rope.dimension_count": 4,
    "rope.scaling.type": "ntk",
    "rope.scaling.attn_factor": -1.2,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.2,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "rope.scale_linear": 4.0,  # of old files
    "rope.freq_base_swa": 500.0,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "leading_dense_block_count": 1,
    "swiglu_clamp_exp": 7.0,
    "a_key_of_next_year": 1,
}


@pytest.mark.parametrize(("key", "value"), CHANGES.items())
def test_a_key_that_changes_the_result_is_refused_by_name(
    key: str, value: float | bool | str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "odd.gguf", keys={key: value})
    refuses(tmp_path / "odd.gguf", "odd.gguf", f"llama.{key}")


def test_experts_need_to_say_how_many_a_token_has(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", keys={"expert_count": 8})
    refuses(tmp_path / "odd.gguf", "odd.gguf", "llama.expert_used_count")


def test_keys_at_values_that_change_nothing_are_no_fault(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "fine.gguf",
        keys={
            "logit_scale": 1.0,
            "residual_scale": 0.0,
            "attention.scale": 8**-0.5,
            "attention.causal": True,
            "attention.sliding_window": 64,
            "attention.key_length": 8,
            "final_logit_softcapping": 0.0,
            "rope.dimension_count": 8,
            "rope.scaling.type": "none",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.finetuned": True,
            "expert_count": 0,
            "expert_used_count": 0,
            "tensor_data_layout": "reference",
        },
    )
    checkpoint = open_checkpoint(tmp_path / "fine.gguf")
    assert checkpoint.spec.rope == RopeSpec(10_000.0)
    checkpoint.close()


@pytest.mark.parametrize(
    "name", ["blk.0.attn_k.bias", "blk.1.attn_q_norm.weight", "output.bias", "token_norm"]
)
def test_a_tensor_that_the_model_has_no_use_for_is_refused_by_name(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", tensors=[name])
    refuses(tmp_path / "odd.gguf", f"tensor {name!r}")


@pytest.mark.parametrize("name", ["cls.output.weight", "cls.weight"])
def test_a_classification_head_is_refused_before_its_keys(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "head.gguf", keys={"classifier.output_labels": "yes"}, tensors=[name])
    refuses(tmp_path / "head.gguf", f"{name!r} is a classification head")


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "odd.gguf"
    write_gguf(file, keys={"logit_scalf": 1.0})
    file.write_bytes(file.read_bytes().replace(b"llama.logit_scalf", b"llama.block_count"))
    refuses(file, "llama.block_count", "twice")


MIXTURE: dict[str, Any] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.vocab_size": 32,
    "qwen3moe.block_count": 2,
    "qwen3moe.context_length": 64,
    "qwen3moe.embedding_length": 16,
    "qwen3moe.attention.head_count": 2,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3moe.expert_count": 4,
    "qwen3moe.expert_used_count": 2,
    "qwen3moe.expert_feed_forward_length": 8,
}


def test_what_ends_an_output_is_named_by_the_file_or_known_of_the_family() -> None:
    metadata = {key.replace("qwen3moe", "gpt-oss"): value for key, value in MIXTURE.items()}
    metadata |= {
        "general.architecture": "gpt-oss",
        "gpt-oss.vocab_size": 7,
        "gpt-oss.attention.key_length": 8,
    }
    metadata["tokenizer.ggml.tokens"] = ["<|endoftext|>", "a", "<|return|>", "b", "<|eom|>", "<|call|>", "c"]
    named = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eom_token_id": 4}
    assert spec_from_gguf(metadata | named, {}, {}, "x.gguf").eos_token_ids == (2, 4, 0, 5)
    assert spec_from_gguf(metadata | {"gpt-oss.vocab_size": 5}, {}, {}, "x.gguf").eos_token_ids == (0,)


def test_an_architecture_that_is_no_name_is_refused() -> None:
    with pytest.raises(ModelError, match=r"general\.architecture "):
        spec_from_gguf(MIXTURE | {"general.architecture": ["qwen3moe"]}, {}, {}, "x.gguf")


@pytest.mark.parametrize("normed", [True, False])
def test_the_norm_flag_of_a_mixture_is_followed(normed: bool) -> None:
    spec = spec_from_gguf(MIXTURE | {"qwen3moe.expert_weights_norm": normed}, {}, {}, "x.gguf")
    assert spec.moe is not None
    assert spec.moe.norm_topk_prob is normed


def test_a_rope_factor_without_a_type_is_linear() -> None:
    spec = spec_from_gguf(MIXTURE | {"qwen3moe.rope.scaling.factor": 4.0}, {}, {}, "x.gguf")
    assert spec.rope == RopeSpec(10_000.0, LinearScaling(4.0))


def test_windows_of_olmo_3_have_the_theta_of_the_file_without_its_scaling() -> None:
    dense = {key: value for key, value in MIXTURE.items() if "expert" not in key}
    metadata = {key.replace("qwen3moe", "olmo2"): value for key, value in dense.items()}
    metadata |= {
        "general.architecture": "olmo2",
        "olmo2.feed_forward_length": 8,
        "olmo2.attention.sliding_window": 9,
        "olmo2.rope.freq_base": 700.0,
        "olmo2.rope.scaling.factor": 4.0,
    }
    spec = spec_from_gguf(metadata, {}, {}, "x.gguf")
    assert (spec.rope_of(0), spec.rope) == (RopeSpec(700.0), RopeSpec(700.0, LinearScaling(4.0)))


GRANITE: dict[str, Any] = {
    key.replace("qwen3moe", "granite"): value for key, value in MIXTURE.items() if "expert" not in key
} | {"general.architecture": "granite", "granite.feed_forward_length": 8}


def test_a_granite_without_mamba_may_say_its_kv_heads_for_each_block_and_what_mamba_would_have() -> None:
    keys = {"granite.attention.head_count_kv": [1, 1], "granite.ssm.state_size": 64}
    assert spec_from_gguf(GRANITE | keys, {}, {}, "x.gguf").kv_heads == 1


@pytest.mark.parametrize(
    "kv_heads", [[], [1], [1, 0], [0, 0], [1, 1, 1], [[1], [1]], ["1", "1"], [True, True]]
)
def test_kv_heads_that_are_not_one_number_are_refused(kv_heads: list[Any]) -> None:
    with pytest.raises(ModelError, match=r"granite\.attention\.head_count_kv"):
        spec_from_gguf(GRANITE | {"granite.attention.head_count_kv": kv_heads}, {}, {}, "x.gguf")
