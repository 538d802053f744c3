"""Fields of a quantization_config about how weights were quantized, not about what the tensors mean.

They are those of transformers' classes, AutoGPTQ, GPTQModel, AutoAWQ, AutoRound and compressed-tensors.
"""

METADATA = frozenset(
    {
        # which programs, in which versions
        "autoround_version", "backend", "iters", "meta", "model_file_base_name", "model_name_or_path",
        "producer", "provider", "quantizer", "version", "quant_method",
        # what the weights were calibrated with
        "batch_size", "cache_block_outputs", "dataset", "max_input_length", "model_seqlen", "nsamples",
        "pad_token_id", "seqlen", "tokenizer", "train_bs",
        # how they were rounded
        "act_group_aware", "amp", "damp_auto_increment", "damp_percent", "enable_minmax_tuning",
        "enable_norm_bias_tuning", "enable_quanted_input", "global_compression_ratio",
        "gradient_accumulate_steps", "low_gpu_mem_usage", "lr", "minmax_lr", "mse", "observer",
        "observer_kwargs", "offload_to_disk", "parallel_packing", "static_groups", "sym", "true_sequential",
        # which modules: the tensors tell
        "block_name_to_quantize", "lm_head", "module_name_preceding_first_block",
        "modules_in_block_to_quantize", "targets",
        # in which dtype something was computed; tensors have dtypes of their own
        "model_dtype", "scale_dtype", "zp_dtype",
        # how others compute; activations are not quantized here
        "dequantize", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len",
        "input_activations", "modules_to_fuse", "output_activations", "run_compressed", "use_cuda_fp16",
        "use_exllama",
    }
)  # fmt: skip
