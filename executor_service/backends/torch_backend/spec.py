"""`ModelSpec`: what a decoder-only model is, read from a config.json or from GGUF metadata.

Sources: the `config.json` of Hugging Face's Llama, Qwen2, Qwen3 and Qwen3-MoE, and the GGUF
specification's keys (github.com/ggml-org/ggml/blob/master/docs/gguf.md). What this model can't compute
is refused here, with a ModelError that says what, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor_service.backends.base import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_MAX_SIZE = 1 << 24  # of any dimension: far above every known model, far below an overflow
_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021), with the scaling of `kind`."""

    theta: float
    kind: str = "default"  # "default", "linear" (Chen et al. 2023), "llama3" (Llama 3.1's)
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # llama3, in tokens


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts: softmax over all experts, then the best `experts_per_token`."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]  # the others have a dense MLP


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary attention with grouped KV heads, SwiGLU."""

    architecture: str  # one of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int  # tokens
    norm_eps: float
    rope: RopeSpec
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool  # RMSNorm per head on queries and keys
    tied_embeddings: bool  # the output layer is the embedding
    moe: MoeSpec | None
    eos_token_ids: tuple[int, ...]


class _Fields:
    """Typed, bounded reads from a mapping whose origin is not trusted."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def fault(self, message: str) -> ModelError:
        return ModelError(f"{self.where}: {message}")

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.fault(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.fault(f"{key} is {str(value)[:40]!r}, expected a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.fault(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
            raise self.fault(f"{key} is {str(value)[:40]!r}, expected a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(f"{key} is {str(value)[:40]!r}, expected true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key, [])
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise self.fault(f"{key} is {str(value)[:40]!r}, expected token ids")
        return tuple(values)


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec of a Hugging Face directory; `where` names the file in errors. Raises ModelError."""
    f = _Fields(config, where)
    architecture = f.get("model_type", None)
    if architecture not in ARCHITECTURES:
        raise f.fault(
            f"model_type {str(architecture)[:40]!r} is not supported, only {', '.join(ARCHITECTURES)}"
        )
    if f.get("hidden_act", "silu") != "silu":
        raise f.fault(f"hidden_act {f.values['hidden_act']!r} is not supported, only silu")
    if f.get("mlp_bias", False):
        raise f.fault("mlp_bias is not supported")
    if "quantization_config" in config:
        raise f.fault("quantization_config is not supported: give unquantized weights, or a GGUF file")
    layers = f.size("num_hidden_layers", most=_MAX_LAYERS)
    context = f.size("max_position_embeddings")
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    _refuse_sliding_window(f, layers, context)
    attention_bias = f.flag("attention_bias", False)
    stops = _Fields(generation, "generation_config.json").ids("eos_token_id") or f.ids("eos_token_id")
    moe = None
    if architecture == "qwen3_moe":
        # transformers renamed num_experts to num_local_experts in version 5
        key = "num_local_experts" if "num_local_experts" in config else "num_experts"
        moe = MoeSpec(
            experts=f.size(key, most=4096),
            experts_per_token=f.size("num_experts_per_tok", most=4096),
            intermediate_size=f.size("moe_intermediate_size"),
            norm_topk_prob=f.flag("norm_topk_prob", False),
            sparse_layers=_sparse_layers(f, layers),
        )
    return _checked(
        f,
        ModelSpec(
            architecture=architecture,
            vocab_size=f.size("vocab_size"),
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=f.size("num_key_value_heads", heads),
            head_dim=f.size("head_dim", max(hidden // heads, 1)),
            intermediate_size=f.size("intermediate_size"),
            context_length=context,
            norm_eps=f.number("rms_norm_eps", 1e-6),
            rope=_rope_from_config(f, context),
            qkv_bias=attention_bias or architecture == "qwen2",
            output_bias=attention_bias and architecture != "qwen2",
            qk_norm=architecture in ("qwen3", "qwen3_moe"),
            tied_embeddings=f.flag("tie_word_embeddings", False),
            moe=moe,
            eos_token_ids=stops,
        ),
    )


def spec_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, object], where: str) -> ModelSpec:
    """The spec of a GGUF file, from its metadata and the names of its tensors. Raises ModelError."""
    f = _Fields(metadata, where)
    name = f.get("general.architecture", None)
    if name not in _GGUF_ARCHITECTURES:
        known = ", ".join(_GGUF_ARCHITECTURES)
        raise f.fault(f"general.architecture {str(name)[:40]!r} is not supported, only {known}")
    architecture = _GGUF_ARCHITECTURES[name]
    layers = f.size(f"{name}.block_count", most=_MAX_LAYERS)
    hidden, heads = f.size(f"{name}.embedding_length"), f.size(f"{name}.attention.head_count")
    head_dim = f.size(f"{name}.attention.key_length", max(hidden // heads, 1))
    if f.size(f"{name}.attention.value_length", head_dim) != head_dim:
        raise f.fault("keys and values of different length are not supported")
    if f.size(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise f.fault("rotating a part of each head is not supported")
    if f.get(f"{name}.attention.sliding_window", 0):
        raise f.fault("sliding window attention is not supported")
    scaling = f.get(f"{name}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise f.fault(f"rope scaling {str(scaling)[:40]!r} is not supported, only none and linear")
    factor = f.number(f"{name}.rope.scaling.factor", 1.0) if scaling == "linear" else 1.0
    rope = RopeSpec(
        f.number(f"{name}.rope.freq_base", 10_000.0), "linear" if scaling == "linear" else "default", factor
    )
    tokens = f.get("tokenizer.ggml.tokens", None)
    moe = None
    if architecture == "qwen3_moe":
        moe = MoeSpec(
            experts=f.size(f"{name}.expert_count", most=4096),
            experts_per_token=f.size(f"{name}.expert_used_count", most=4096),
            intermediate_size=f.size(f"{name}.expert_feed_forward_length"),
            norm_topk_prob=True,  # the format has no key for it: qwen3moe always normalises
            sparse_layers=frozenset(range(layers)),
        )
    elif f.get(f"{name}.expert_count", 0):
        raise f.fault(f"experts in the architecture {name} are not supported")
    stops = f.ids("tokenizer.ggml.eos_token_id") + f.ids("tokenizer.ggml.eot_token_id")
    return _checked(
        f,
        ModelSpec(
            architecture=architecture,
            vocab_size=f.size(f"{name}.vocab_size", len(tokens) if isinstance(tokens, list) else None),
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=f.size(f"{name}.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=f.size(f"{name}.feed_forward_length", 1 if moe else None),
            context_length=f.size(f"{name}.context_length"),
            norm_eps=f.number(f"{name}.attention.layer_norm_rms_epsilon"),
            rope=rope,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            qk_norm=architecture in ("qwen3", "qwen3_moe"),
            tied_embeddings="output.weight" not in tensors,
            moe=moe,
            eos_token_ids=tuple(dict.fromkeys(stops)),
        ),
    )


def _checked(f: _Fields, spec: ModelSpec) -> ModelSpec:
    if spec.heads % spec.kv_heads:
        raise f.fault(f"{spec.heads} heads can't be shared by {spec.kv_heads} KV heads")
    if spec.head_dim % 2:
        raise f.fault(f"head dimension {spec.head_dim} is odd; rotary embedding needs pairs")
    if spec.moe and spec.moe.experts_per_token > spec.moe.experts:
        raise f.fault(f"{spec.moe.experts_per_token} experts per token of only {spec.moe.experts}")
    if any(i >= spec.vocab_size for i in spec.eos_token_ids):
        raise f.fault(f"eos ids {spec.eos_token_ids} lie outside of the vocabulary of {spec.vocab_size}")
    return spec


def _rope_from_config(f: _Fields, context: int) -> RopeSpec:
    # transformers 5 writes `rope_parameters`; before that, `rope_theta` beside `rope_scaling`.
    given = f.get("rope_parameters", f.get("rope_scaling", {}))
    if not isinstance(given, Mapping):
        raise f.fault("rope_parameters is not an object")
    r = _Fields(given, f.where)
    theta = r.number("rope_theta", f.number("rope_theta", 10_000.0))
    if r.get("partial_rotary_factor", f.get("partial_rotary_factor", 1.0)) != 1.0:
        raise f.fault("rotating a part of each head (partial_rotary_factor) is not supported")
    kind = r.get("rope_type", r.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", r.number("factor"))
    if kind == "llama3":
        low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
        if not low < high:
            raise f.fault(f"rope low_freq_factor {low} is not below high_freq_factor {high}")
        original = r.size("original_max_position_embeddings", context)
        return RopeSpec(theta, "llama3", r.number("factor"), low, high, original)
    raise f.fault(f"rope scaling {str(kind)[:40]!r} is not supported, only linear and llama3")


def _refuse_sliding_window(f: _Fields, layers: int, context: int) -> None:
    kinds = f.get("layer_types", [])
    listed = isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds[:layers])
    window = f.get("sliding_window", None)
    used = f.get("use_sliding_window", False) and isinstance(window, int) and window < context
    if listed or (used and f.get("max_window_layers", 0) < layers):
        raise f.fault("sliding window attention is not supported")


def _sparse_layers(f: _Fields, layers: int) -> frozenset[int]:
    step = f.size("decoder_sparse_step", 1)
    dense = f.ids("mlp_only_layers")
    return frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
