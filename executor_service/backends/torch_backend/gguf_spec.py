"""`spec_from_gguf`: the spec of a GGUF file, from its metadata and the names of its tensors.

Source: the keys of the GGUF specification (github.com/ggml-org/ggml/blob/master/docs/gguf.md). Keys
under the architecture's name are hyperparameters, so unknown ones are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from executor_service.backends.torch_backend.families import FAMILIES, Family
from executor_service.backends.torch_backend.rope.from_gguf import rope_from_gguf
from executor_service.backends.torch_backend.spec import (
    MAX_END_IDS,
    MAX_EXPERTS,
    MAX_LAYERS,
    ModelSpec,
    MoeSpec,
    checked,
)
from executor_service.files.fields import Fields, shown

_ARCHITECTURES = {family.gguf: architecture for architecture, family in FAMILIES.items() if family.gguf}
_HARMLESS = (
    "attention.layer_norm_epsilon",  # of norms that these architectures don't have
    "attention.sliding_window_pattern",  # of windows, which are refused
    "pooling_type",  # of embeddings, not of logits
    "rope.scaling.finetuned",
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.output_scale", "attention.temperature_scale"), (0, 1)),
    "attention.temperature_length": (0,),
    "attention.causal": (True,),
    "attention.shared_kv_layers": (0,),
    "use_parallel_residual": (False,),
    "tensor_data_layout": ("reference", "Meta AI original pth"),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "expert_gating_func": (0, 1),  # unset, softmax
    **dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("leading_dense_block_count", "nextn_predict_layers", "n_deepstack_layers"), (0,)),
    **dict.fromkeys(("interleave_moe_layer_step", "moe_every_n_layers"), (0, 1)),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"), (0,)),
}
"""Keys that change the model's results, each with the values at which it changes nothing."""


def spec_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, object],
    rope_factors: Mapping[str, tuple[float, ...]],
    where: str,
) -> ModelSpec:
    """The spec of a GGUF file; `rope_factors`: what `rope.from_gguf` needs of tensors. Raises ModelError."""
    f = Fields(metadata, where)
    name = f.get("general.architecture", None)
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise f.fault(f"general.architecture {shown(name)} is not supported, only {known}")
    architecture = _ARCHITECTURES[name]
    family = FAMILIES[architecture]
    for key, accepted in _NEUTRAL.items():
        f.only(f"{name}.{key}", accepted)
    f.ignore(*(f"{name}.{key}" for key in _HARMLESS))
    layers = f.size(f"{name}.block_count", max_size=MAX_LAYERS)
    hidden, heads = f.size(f"{name}.embedding_length"), f.size(f"{name}.attention.head_count")
    head_dim = f.size(f"{name}.attention.key_length", max(hidden // heads, 1))
    if f.size(f"{name}.attention.value_length", head_dim) != head_dim:
        raise f.fault(f"{name}.attention.value_length other than that of keys is not supported")
    if f.size(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise f.fault(f"{name}.rope.dimension_count: rotating a part of each head is not supported")
    context = f.size(f"{name}.context_length")
    window = f.get(f"{name}.attention.sliding_window", 0)
    if not isinstance(window, int) or 0 < window < context:
        raise f.fault(f"{name}.attention.sliding_window {shown(window)} is not supported")
    scale = f.get(f"{name}.attention.scale", 0)
    if not isinstance(scale, (int, float)) or not (
        scale == 0 or math.isclose(scale, head_dim**-0.5, rel_tol=1e-5)
    ):
        raise f.fault(f"{name}.attention.scale {shown(scale)} is not supported, only {head_dim**-0.5:g}")
    tokens = f.get("tokenizer.ggml.tokens", None)
    vocab_size = f.size(f"{name}.vocab_size", len(tokens) if isinstance(tokens, list) else None)
    moe = _moe(f, name, family, layers)
    stops = tuple(
        i
        for kind in ("eos", "eot")
        for i in f.end_ids(f"tokenizer.ggml.{kind}_token_id", vocab_size, MAX_END_IDS // 2)
    )
    rope = rope_from_gguf(f, f"{name}.rope.", head_dim, context, rope_factors)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=f.size(f"{name}.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=f.size(f"{name}.feed_forward_length", 1 if moe else None),
        context_length=rope.longest_context(context),
        norm_eps=f.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope=rope,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=family.qk_norm,
        tied_embeddings="output.weight" not in tensors,
        window=None,
        moe=moe,
        eos_token_ids=tuple(dict.fromkeys(stops)),
    )
    f.refuse_unread(f"{name}.")
    return checked(f, spec)


def _moe(f: Fields, name: str, family: Family, layers: int) -> MoeSpec | None:
    if not family.mixture:
        f.only(f"{name}.expert_count", (0,))
        f.ignore(*(f"{name}.expert_{key}" for key in ("used_count", "feed_forward_length", "weights_norm")))
        return None
    return MoeSpec(
        experts=f.size(f"{name}.expert_count", max_size=MAX_EXPERTS),
        experts_per_token=f.size(f"{name}.expert_used_count", max_size=MAX_EXPERTS),
        intermediate_size=f.size(f"{name}.expert_feed_forward_length"),
        norm_topk_prob=f.flag(
            f"{name}.expert_weights_norm", default=True
        ),  # seldom said: llama.cpp always does
        sparse_layers=frozenset(range(layers)),
    )
