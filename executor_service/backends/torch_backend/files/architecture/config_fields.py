"""What config.json fields are accepted that no code reads: at which values, and which at any.

A field that `config_json.py` does not read and that is not here is refused by name: it may change what the
model computes. transformers ignores fields that a class does not have, but who wrote them wanted something.
"""

from __future__ import annotations

from typing import Any

_ON, _OFF, _ONE, _NONE = (True,), (False,), (1,), (0,)
_NEVER = ()
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # norms
    **dict.fromkeys(("norm_type", "normalization_type"), ("rms_norm", "rmsnorm", "RMSNorm", "rms")),
    **dict.fromkeys(("add_unit_offset", "rms_norm_add_unit_offset", "zero_centered_gamma"), _OFF),
    # scales of embeddings, residuals, attention and logits
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "lm_head_multiplier"), _ONE),
    **dict.fromkeys(("logit_scale", "logits_scaling", "scale_emb", "key_multiplier"), _ONE),
    **dict.fromkeys(("embedding_scale", "residual_scale", "output_multiplier_scale"), _ONE),
    **dict.fromkeys(("attention_multiplier", "attention_scale", "attn_scale", "softmax_scale"), _NEVER),
    "rope_local_base_freq": _NEVER,
    **dict.fromkeys(("query_pre_attn_scalar", "scale_depth", "dim_model_base", "mlp_multipliers"), _NEVER),
    **dict.fromkeys(("scale_embedding", "attn_temperature_tuning", "use_logn_attn"), _OFF),
    # clipping
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), _NEVER),
    **dict.fromkeys(("router_logit_softcapping", "clip_qkv", "swiglu_limit"), _NEVER),
    # biases
    **dict.fromkeys(("mlp_bias", "lm_head_bias", "use_bias", "bias", "attention_out_bias"), _OFF),
    # which positions are seen
    "is_causal": _ON,
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"), _OFF),
    **dict.fromkeys(("attention_chunk_size", "sliding_window_pattern", "cross_attention_layers"), ([],)),
    **dict.fromkeys(("attn_output_gate", "attention_sink", "use_attention_sinks"), _OFF),
    # positions
    "position_embedding_type": ("rope", "rotary"),
    **dict.fromkeys(("alibi", "rope_interleaved", "rope_interleave", "use_mrope", "use_dynamic_ntk"), _OFF),
    **dict.fromkeys(("rotary_pct", "rotary_percent", "rope_percent", "rope_ratio"), _ONE),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "mrope_section", "rotary_dim"), ([],)),
    # layers
    **dict.fromkeys(("use_parallel_residual", "parallel_residual", "parallel_attn"), _OFF),
    **dict.fromkeys(("num_kv_shared_layers", "num_memory_blocks"), _NONE),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"), _NEVER),
    **dict.fromkeys(("pruned_heads", "per_layer_config"), ({},)),
    **dict.fromkeys(("full_attn_mod", "interpolate_factor"), _ONE),  # of Phi-4-mini
    # experts
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "shared_expert_intermediate_size"), _NONE),
    **dict.fromkeys(("n_routed_experts", "first_k_dense_replace"), _NONE),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), (0, 1)),
    **dict.fromkeys(("routed_scaling_factor", "moe_layer_freq"), _ONE),
    **dict.fromkeys(("scoring_func", "expert_gating_func"), ("softmax",)),
    **dict.fromkeys(("use_expert_bias", "use_routing_bias", "moe_router_enable_expert_bias"), _OFF),
    # other forms of a model
    "compression_config": _NEVER,
    **dict.fromkeys(("text_config", "vision_config", "audio_config"), _NEVER),
}
"""Fields that change the model's results, each with the values at which it changes nothing; null is one."""

HARMLESS = frozenset(
    {
        # names and versions
        "_name_or_path", "_commit_hash", "architectures", "auto_map", "name_or_path", "tokenizer_class",
        "is_llama_config", "license", "transformers_version", "transformers.js_config", "unsloth_fixed",
        "unsloth_version",
        # how transformers computes
        "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
        "_flash_attn_2_enabled", "attn_implementation", "cache_implementation", "chunk_size_feed_forward",
        "dtype", "experts_implementation", "output_attentions", "output_hidden_states",
        "output_router_logits", "pretraining_tp", "return_dict", "tf_legacy_loss", "torch_dtype",
        "torchscript", "use_bfloat16", "use_cache", "use_flash_attn", "use_return_dict",
        # training
        "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout",
        "embedding_dropout", "residual_dropout", "embd_pdrop", "gradient_checkpointing", "hidden_dropout",
        "hidden_dropout_prob", "initializer_range", "initializer_factor", "neftune_noise_alpha",
        "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef",
        # tasks
        "finetuning_task", "id2label", "label2id", "num_labels", "prefix", "problem_type",
        "task_specific_params", "sbert_ce_default_activation_function", "sentence_transformers",
        # lengths that tokenizers and older code look at; max_position_embeddings is read
        "max_sequence_length", "model_max_length", "tokenizer_model_max_length", "tokenizer_padding_side",
        # token ids; the ids that end a text are read
        "bos_token_id", "decoder_start_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
        # encoders and decoders: what is_encoder_decoder and add_cross_attention, which are refused, would use
        "cross_attention_hidden_size", "is_decoder", "tie_encoder_decoder",
        # sampling, which a request decides
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
        "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
        "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
        "typical_p",
    }
)  # fmt: skip
"""Fields that change nothing that the model computes, whatever their value."""
