"""The config.json files of Mistral, Mixtral, Gemma 3, Phi and OLMo-2 are read as what these models are."""

from __future__ import annotations

from typing import Any

import pytest

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.architecture.rope.spec import LongRope, RopeSpec
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec, QkNorm

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0",
    "use_cache": True,
}
_MISTRAL: dict[str, Any] = _COMMON | {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
_PHI: dict[str, Any] = _COMMON | {
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "model_type": "phi3",
    "num_hidden_layers": 32,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
}
_GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}


def spec_of(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return spec_from_config(config | changes, {}, "config.json")


def test_mistral_7b_has_a_window_in_all_layers_and_later_ones_have_none() -> None:
    first = spec_of(_MISTRAL)
    assert [first.window_of(i) for i in range(32)] == [4096] * 32
    later = spec_of(_MISTRAL, sliding_window=None, rope_theta=1e6, vocab_size=32768)
    assert later.window is None
    nemo = {"head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 1024000, "num_hidden_layers": 40}
    assert spec_of(_MISTRAL, **nemo, sliding_window=None).head_dim == 128


def test_mixtral_8x7b_has_experts_whose_shares_add_up_to_1() -> None:
    experts = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    }
    spec = spec_of(_MISTRAL, **experts)
    assert spec.moe is not None
    assert (spec.moe.experts, spec.moe.experts_per_token) == (8, 2)
    assert (spec.moe.intermediate_size, spec.moe.norm_topk_prob) == (14336, True)
    assert spec.moe.sparse_layers == frozenset(range(32))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {  # as later versions of transformers write it
            "_sliding_window_pattern": 6,
            "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)],
            "sliding_window_pattern": None,
            "use_bidirectional_attention": False,
        },
    ],
)
def test_gemma_3_1b_has_windows_with_a_rope_of_their_own(changes: dict[str, Any]) -> None:
    spec = spec_of(_GEMMA, **changes)
    full = [i for i in range(26) if not spec.window_of(i)]
    assert full == [5, 11, 17, 23]
    assert spec.window_of(0) == 512
    assert (spec.rope_of(0), spec.rope_of(5)) == (RopeSpec(10_000.0), RopeSpec(1_000_000.0))
    assert (spec.attention_scale, spec.embedding_scale) == (1 / 16, 1152**0.5)
    assert (spec.activation, spec.qk_norm, spec.norm_offset) == (Activation.GELU, QkNorm.HEAD, 1.0)
    assert spec.tied_embeddings
    assert spec.eos_token_ids == (1, 106)


def test_phi_3_mini_has_a_window_and_phi_4_mini_rotates_a_part_of_each_head() -> None:
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096}
    first = spec_of(_PHI, **sizes, sliding_window=2047, vocab_size=32064, rope_scaling=None)
    assert first.window_of(31) == 2047
    assert (first.head_dim, first.rotary_dim) == (96, 96)
    mini = {
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    }
    spec = spec_of(_PHI, **mini)
    assert (spec.head_dim, spec.rotary_dim, spec.window) == (128, 96, None)
    assert isinstance(spec.rope.scaling, LongRope)
    assert spec.rope.scaling.original_context == 4096


def test_olmo_2_7b_norms_what_attention_and_mlp_add() -> None:
    spec = spec_of(
        _COMMON,
        architectures=["Olmo2ForCausalLM"],
        attention_bias=False,
        eos_token_id=100257,
        hidden_size=4096,
        intermediate_size=11008,
        max_position_embeddings=4096,
        model_type="olmo2",
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=32,
        pad_token_id=100277,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=500000,
        vocab_size=100352,
    )
    assert spec.norms == ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
    assert spec.qk_norm is QkNorm.ALL


def test_olmo_3_has_no_field_for_the_theta_of_windows() -> None:
    """transformers ignores Gemma's."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 211}
    assert spec_of(_COMMON, **sizes, model_type="olmo3").rope_of(0) == RopeSpec(500_000.0)
    with pytest.raises(ModelError, match="rope_local_base_freq"):
        spec_of(_COMMON, **sizes, model_type="olmo3", rope_local_base_freq=777.0)
