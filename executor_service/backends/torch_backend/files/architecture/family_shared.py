"""What several families share: default sizes, names of norms, fused tensors and biases."""

from __future__ import annotations

from executor_service.backends.torch_backend.files.architecture.family import BiasRule
from executor_service.backends.torch_backend.files.architecture.spec import NormNames

QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
MISTRAL = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
OLMO = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
}
GLM = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
UNUSED_MIXERS = frozenset(
    {
        *("intermediate_size", "num_experts_per_tok", "init_method", "time_step_limit", "mamba_n_heads"),
        *(
            "mamba_n_groups",
            "mamba_d_state",
            "mamba_d_head",
            "mamba_d_conv",
            "mamba_expand",
            "mamba_chunk_size",
        ),
        *("mamba_conv_bias", "mamba_proj_bias"),
    }
)
"""Fields of Granite 4 about experts and layers without attention, also of models that have neither."""
UNUSED_HUNYUAN = frozenset(
    (
        *("im_start_id", "im_end_id", "im_newline_id", "mask_init_id", "text_start_id", "text_end_id"),
        *("eod_token_id", "pad_id", "org_vocab_size"),
        *("cla_share_factor", "class_num", "dense_list", "pool_type"),
    )
)
"""Fields of HunYuan about images, classes and shared caches, also of models that have none, and token ids."""
QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"  # tensors with several layers in one
NORMS_AROUND = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
NORMS_AFTER = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")
MLP_BIASES = BiasRule(mlp=("mlp_bias", False))
GLM_ENDS = ("<|observation|>",)  # `Family.gguf_ends`: after a call
POST_NORM = (("ffn_norm", "post_attention_norm"),)  # `Family.gguf_renamed`
