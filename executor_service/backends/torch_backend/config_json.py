"""`spec_from_config`: the spec of a Hugging Face directory, from its config.json.

Fields and their defaults are those of `LlamaConfig`, `Qwen2Config`, `Qwen3Config` and `Qwen3MoeConfig` in
transformers 5. A field that is neither read here nor listed in `config_fields.py` is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor_service.backends.torch_backend.config_fields import HARMLESS, NEUTRAL
from executor_service.backends.torch_backend.rope.from_config import rope_from_config
from executor_service.backends.torch_backend.spec import (
    ARCHITECTURES,
    MAX_END_IDS,
    MAX_EXPERTS,
    MAX_LAYERS,
    ModelSpec,
    MoeSpec,
    checked,
)
from executor_service.files.fields import Fields, shown

_QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
}
_SLIDING_WINDOW, _FIRST_SLIDING_LAYER = 4096, 28  # defaults of Qwen2 and Qwen3


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec of a Hugging Face directory; `where` names the file in errors. Raises ModelError.

    `generation` is what generation_config.json holds; its end ids come first.
    """
    f = Fields(config, where)
    architecture = f.get("model_type", None)
    if architecture not in ARCHITECTURES:
        raise f.fault(f"model_type {shown(architecture)} is not supported, only {', '.join(ARCHITECTURES)}")
    if f.get("quantization_config", None) is not None:
        raise f.fault("quantization_config is not supported: give unquantized weights, or a GGUF file")
    for key, accepted in NEUTRAL.items():
        f.only(key, accepted)
    f.ignore(*HARMLESS)
    defaults = _DEFAULTS[architecture]

    def size(key: str) -> int:
        return f.size(key, defaults.get(key))

    qwen2, qk_norm = architecture == "qwen2", architecture in ("qwen3", "qwen3_moe")
    f.only("qkv_bias", (qwen2,))
    for key in ("qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_layernorm"):
        f.only(key, (qk_norm,))
    layers = f.size("num_hidden_layers", defaults["num_hidden_layers"], MAX_LAYERS)
    positions = size("max_position_embeddings")
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    vocab_size = size("vocab_size")
    _refuse_sliding_window(f, architecture, layers, positions)
    attention_bias = f.flag("attention_bias", default=False)
    end_ids = "eos_token_id", vocab_size, MAX_END_IDS
    stops = Fields(generation, "generation_config.json").end_ids(*end_ids) or f.end_ids(*end_ids)
    f.ignore("eos_token_id")
    # Null means as many KV heads as heads; where the field is missing, the class has its own default.
    kv_heads = heads if "num_key_value_heads" in config else defaults.get("num_key_value_heads", heads)
    head_dim = f.size("head_dim", defaults.get("head_dim", max(hidden // heads, 1)))
    rope = rope_from_config(f, head_dim, positions)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=f.size("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        intermediate_size=size("intermediate_size"),
        context_length=rope.longest_context(positions),
        norm_eps=f.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=attention_bias or qwen2,
        output_bias=attention_bias and not qwen2,
        qk_norm=qk_norm,
        tied_embeddings=f.flag("tie_word_embeddings", default=False),
        moe=_moe(f, architecture, layers),
        eos_token_ids=stops,
    )
    f.refuse_unread()
    return checked(f, spec)


def _moe(f: Fields, architecture: str, layers: int) -> MoeSpec | None:
    if architecture != "qwen3_moe":
        for key in ("num_experts", "num_local_experts"):
            f.only(key, (0,))
        return None
    defaults = _DEFAULTS[architecture]
    # transformers renamed num_experts to num_local_experts in version 5
    names = [name for name in ("num_local_experts", "num_experts") if f.get(name, None) is not None]
    if len({f.size(name, max_size=MAX_EXPERTS) for name in names}) > 1:
        raise f.fault(f"num_experts {f.values['num_experts']} is not num_local_experts")
    step, dense = f.size("decoder_sparse_step", 1), frozenset(f.ids("mlp_only_layers"))
    return MoeSpec(
        experts=f.size(names[0] if names else "num_experts", 128, MAX_EXPERTS),
        experts_per_token=f.size("num_experts_per_tok", defaults["num_experts_per_tok"], MAX_EXPERTS),
        intermediate_size=f.size("moe_intermediate_size", defaults["moe_intermediate_size"]),
        norm_topk_prob=f.flag("norm_topk_prob", default=False),
        sparse_layers=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


def _refuse_sliding_window(f: Fields, architecture: str, layers: int, context: int) -> None:
    given = f.get("layer_types", None)
    f.ignore("use_sliding_window", "sliding_window", "max_window_layers")  # read where a window is in use
    kinds = ["full_attention"] * layers if given is None else given
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise f.fault(f"layer_types is {shown(kinds)}, expected a list of {layers} types")
    if any(kind != "full_attention" for kind in kinds[:layers]):
        raise f.fault("layer_types other than full_attention (sliding window) are not supported")
    decided = given is not None and architecture != "qwen3_moe"  # Qwen3-MoE ignores layer_types
    if decided or not f.flag("use_sliding_window", default=False):
        return
    window = f.values.get("sliding_window", _SLIDING_WINDOW)
    # In Qwen3-MoE the window applies to all layers.
    first = 0 if architecture == "qwen3_moe" else f.get("max_window_layers", _FIRST_SLIDING_LAYER)
    if window is None or (isinstance(window, int) and window >= context):
        return
    if not isinstance(first, int) or first < layers:
        raise f.fault(f"use_sliding_window (a sliding window of {shown(window)}) is not supported")
