"""The metadata of a Hugging Face model in a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import gguf

PERMUTED = ("mistral", "mixtral", "granite", "granitemoehybrid", "smollm3", "ministral3")
"""Rows of q and k are permuted, by llama.cpp's converter of Llama models."""


def write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], drafts: int) -> None:
    """Sizes and rope of the model with this config.json; `drafts`: blocks after the last one."""
    _write_sizes(writer, config, drafts)
    _write_windows(writer, config)
    _write_scales(writer, config)
    _write_experts(writer, config)
    _write_rope(writer, config)


def head_dim(config: dict[str, Any]) -> int:
    """Elements of a head."""
    size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return size


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], drafts: int) -> None:
    kind = config["model_type"]
    writer.add_vocab_size(config["vocab_size"])
    stretched = "alpha" in config["rope_parameters"]  # llama.cpp has one length for all of HunYuan's
    writer.add_context_length(256 * 1024 if stretched else config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("shared_intermediate_size", config["intermediate_size"]))
    writer.add_block_count(config["num_hidden_layers"] + drafts)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if drafts:
        writer.add_nextn_predict_layers(drafts)
    if kind == "granitemoehybrid":
        writer.add_head_count_kv([config["num_key_value_heads"]] * config["num_hidden_layers"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim") and kind != "glm":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if kind == "qwen3_vl_text":
        writer.add_num_deepstack_layers(3)


def _write_windows(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    if kind in ("gemma3_text", "gemma2", "gpt_oss"):
        writer.add_sliding_window(config["sliding_window"])
    if kind == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)
    if kind == "olmo3" or (kind == "exaone4" and config["sliding_window"]):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in config["layer_types"]])


def _write_scales(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind in ("granite", "granitemoehybrid"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if kind == "granitemoehybrid":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_rope_scaling_finetuned(True)


def _write_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    if kind not in ("mixtral", "olmoe", "gpt_oss", "qwen2_moe", "glm4_moe", "minimax_m2"):
        return
    [experts] = {
        config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)
    }
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind in ("gpt_oss", "minimax_m2"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind in ("qwen2_moe", "glm4_moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind in ("glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "glm4_moe":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])


def _write_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kind, rope = config["model_type"], config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    stretch = rope.get("alpha", 1.0) ** (head_dim(config) / (head_dim(config) - 2))
    writer.add_rope_freq_base(rope["rope_theta"] * stretch)
    if "alpha" in rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(256 * 1024)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if kind == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope.get("mscale_all_dim", 0.0))
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    rotated = int(head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    if kind == "phi3":
        writer.add_rope_dimension_count(rotated)
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    elif kind in ("glm", "glm4", "glm4_moe", "minimax_m2", *PERMUTED):
        writer.add_rope_dimension_count(rotated)
