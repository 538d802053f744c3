"""`by_fields`: which fields of config.json a tensor follows from, so that an error can name them."""

from __future__ import annotations

_HEADS = ("num_attention_heads", "head_dim", "hidden_size")
_KV_HEADS = ("num_key_value_heads", *_HEADS)  # head_dim may follow from the number of heads
_MLP = ("intermediate_size", "hidden_size")
_EXPERTS = (
    "num_experts (num_local_experts, n_routed_experts)",
    "mlp_only_layers",
    "decoder_sparse_step",
    "first_k_dense_replace",
)
_FIELDS: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("vocab_size", "hidden_size"),
    "lm_head": ("vocab_size", "hidden_size", "tie_word_embeddings"),
    "score": ("num_labels (id2label)", "hidden_size"),
    "norm": ("hidden_size",),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), ("hidden_size",)),
    **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), ("hidden_size",)),
    "qkv_proj": _KV_HEADS,
    "gate_up_proj": _MLP,
    **dict.fromkeys(("q_proj", "o_proj"), _HEADS),
    **dict.fromkeys(("k_proj", "v_proj"), _KV_HEADS),
    **dict.fromkeys(("q_norm", "k_norm", "query_layernorm", "key_layernorm"), ("head_dim", "use_qk_norm")),
    "gate": ("hidden_size", *_EXPERTS),
    "shared_expert_gate": ("hidden_size", *_EXPERTS),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (*_MLP, *_EXPERTS[1:])),
}


_MLP_BIAS, _BIAS = "mlp_bias (use_bias)", "attention_bias (attention_out_bias, qkv_bias, use_bias)"
_MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")


def by_fields(name: str) -> str:
    """ ", by" and the fields that a tensor's presence and shape follow from; "" where none is known."""
    *path, layer, kind = name.split(".")
    fields = _FIELDS.get(layer, ())
    if "block_sparse_moe" in path:
        fields = ("intermediate_size", "hidden_size", "num_local_experts")
    elif "shared_mlp" in path:
        fields = ("shared_intermediate_size", "hidden_size")
    elif "experts" in path:
        fields = ("moe_intermediate_size", "hidden_size", *_EXPERTS)
    elif {"shared_expert", "shared_experts"} & {*path}:
        fields = ("shared_expert_intermediate_size (n_shared_experts)", "hidden_size", *_EXPERTS)
    if fields and "layers" in path:
        fields = ("num_hidden_layers", *fields)
    if fields and kind == "bias":
        fields = (*fields, _MLP_BIAS if layer in _MLP_LAYERS else _BIAS)
    return f", by {', '.join(fields)}" if fields else ""
