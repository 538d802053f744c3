"""`FAMILIES`: what all models of an architecture have in common, and their files need not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.architecture.config_windows import WindowRule
from executor_service.backends.torch_backend.files.architecture.rope.from_config import RopeRule
from executor_service.backends.torch_backend.files.architecture.spec import NormNames, QkNorm

_NORMS, _ROPE = NormNames(), RopeRule()
_QKV, _GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"


@dataclass(frozen=True, slots=True)
class MixtureRule:
    """How config.json describes a mixture of experts."""

    experts: int  # defaults
    experts_per_token: int
    size_field: str  # of the size of an expert
    chosen: bool = False  # it says which layers are mixtures, and whether shares are scaled to a sum of 1
    clamped: bool = False  # as `MoeSpec.clamped`


@dataclass(frozen=True, slots=True)
class BiasRule:
    """Which linear layers have biases: a field of config.json and its default; "": always the default."""

    qkv: tuple[str, bool] = ("attention_bias", False)
    output: tuple[str, bool] = ("attention_bias", False)  # of attention
    mlp: tuple[str, bool] = ("", False)


_BIASES = BiasRule()


@dataclass(frozen=True, slots=True)
class Family:
    """The models of one architecture."""

    sizes: Mapping[str, int]  # config.json's fields and their defaults in transformers 5
    gguf: str  # `general.architecture` of GGUF files; "": they are refused
    fields: frozenset[str] = frozenset()  # that it has beside those of all, some in `config_fields.NEUTRAL`
    window: WindowRule | None = None
    biases: BiasRule = _BIASES
    unrotated_every: int = 0  # default of `no_rope_layer_interval`; 0: it has no such layers
    rope: RopeRule = _ROPE
    norm_eps: float = 1e-6  # default of `rms_norm_eps`
    norms: NormNames = _NORMS
    norm_offset: float = 0.0  # of safetensors files; GGUF files have it in the weights
    activation: tuple[str, Activation] = ("hidden_act", Activation.SILU)  # config.json's field
    qk_norm: QkNorm = QkNorm.NONE
    tied: bool = False  # default of `tie_word_embeddings`
    scaled_embedding: bool = False  # by the square root of the hidden size
    multipliers: bool = False  # of embeddings, of what layers add to them, of scores and logits (Granite)
    caps: tuple[float, float] | None = None  # defaults, of scores and logits; None: it has none
    mixture: MixtureRule | None = None
    sinks: bool = False
    fused: tuple[str, ...] = ()  # tensors with q, k and v, or gate and up, in one
    renamed: tuple[tuple[str, str], ...] = ()  # parts of our tensors' names, and the files' for them
    pairs: bool = False  # directories have the rows of q and k that are rotated together side by side
    gguf_pairs: bool = False  # GGUF files have them so
    gguf_renamed: tuple[
        tuple[str, str], ...
    ] = ()  # a tensor's usual name in a layer, and the one of this family

    @property
    def own_fields(self) -> frozenset[str]:
        """The fields of config.json that other families may not have."""
        own = {field for field, _ in (self.biases.qkv, self.biases.output, self.biases.mlp)}
        if self.multipliers:
            own |= {f"{what}_multiplier" for what in ("embedding", "residual", "attention")} | {
                "logits_scaling"
            }
        if self.caps is not None:
            own |= {"attn_logit_softcapping", "final_logit_softcapping"}
        if self.unrotated_every:
            own |= {"no_rope_layers", "no_rope_layer_interval"}
        return self.fields | own


_QWEN_BIASES = BiasRule(qkv=("", True), output=("", False))
_QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
_MISTRAL = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_OLMO = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
}
_GLM = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
_NORMS_AROUND = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_MLP_BIASES = BiasRule(mlp=("mlp_bias", False))
_GLM_BIASES = BiasRule(qkv=("attention_bias", True), output=("", False))
_NORMS_AFTER = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_QWEN_WINDOW = WindowRule(size=4096, flagged=True, listed=True, first=28)
_QWEN2_VL = Family(
    sizes={
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
    },
    gguf="qwen2vl",
    window=WindowRule(size=4096, flagged=True, listed=True, first=80),
    biases=_QWEN_BIASES,
    rope=RopeRule(1_000_000.0, sections=True),
    norm_eps=1e-5,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        sizes=_LLAMA,
        gguf="llama",
        biases=_MLP_BIASES,
        gguf_pairs=True,
    ),
    "granite": Family(sizes=_LLAMA, gguf="granite", biases=_MLP_BIASES, multipliers=True, gguf_pairs=True),
    "smollm3": Family(
        sizes={
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
        },
        gguf="smollm3",
        window=WindowRule(size=None, flagged=True, listed=True),
        biases=_MLP_BIASES,
        rope=RopeRule(2_000_000.0),
        unrotated_every=4,
        tied=True,
        gguf_pairs=True,
    ),
    "seed_oss": Family(
        sizes={
            "vocab_size": 155_136,
            "hidden_size": 4096,
            "intermediate_size": 27_648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524_288,
        },
        gguf="seed_oss",
        gguf_renamed=(("ffn_norm", "post_attention_norm"),),
        biases=BiasRule(
            qkv=("attention_bias", True), output=("attention_out_bias", False), mlp=("mlp_bias", False)
        ),
    ),
    "ernie4_5": Family(
        sizes={
            "vocab_size": 103_424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131_072,
        },
        gguf="ernie4_5",
        biases=BiasRule(qkv=("use_bias", False), output=("use_bias", False), mlp=("use_bias", False)),
        rope=RopeRule(500_000.0),
        norm_eps=1e-5,
        tied=True,
        pairs=True,
        gguf_pairs=True,
    ),
    "glm": Family(
        sizes=_GLM,
        gguf="",
        biases=_GLM_BIASES,
        rope=RopeRule(partial=0.5),
        norm_eps=1.5625e-7,
        fused=(_GATE_UP,),
        pairs=True,
    ),
    "glm4": Family(
        sizes=_GLM,
        gguf="glm4",
        biases=_GLM_BIASES,
        rope=RopeRule(partial=0.5),
        norm_eps=1.5625e-7,
        norms=NormNames(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
        fused=(_GATE_UP,),
        pairs=True,
        gguf_pairs=True,
    ),
    "exaone4": Family(
        sizes={
            "vocab_size": 102_400,
            "hidden_size": 4096,
            "intermediate_size": 16_384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
        },
        gguf="exaone4",
        fields=frozenset({"sliding_window_pattern"}),
        window=WindowRule(size=4096, listed=True, period=4, only_rotated=True),
        norm_eps=1e-5,
        norms=_NORMS_AFTER,
        qk_norm=QkNorm.HEAD,
    ),
    "gemma2": Family(
        sizes=_GEMMA | {"vocab_size": 256_000, "max_position_embeddings": 8192},
        gguf="gemma2",
        fields=frozenset({"query_pre_attn_scalar"}),
        window=WindowRule(size=4096, listed=True, period=2),
        norms=_NORMS_AROUND,
        norm_offset=1.0,
        activation=("hidden_activation", Activation.GELU),
        caps=(50.0, 30.0),
        scaled_embedding=True,
        tied=True,
    ),
    "mistral": Family(
        sizes=_MISTRAL,
        gguf="llama",
        window=WindowRule(size=4096),
    ),
    "ministral3": Family(
        sizes=_MISTRAL
        | {
            "vocab_size": 131_072,
            "num_hidden_layers": 34,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
        },
        gguf="",
        window=WindowRule(size=None),
        rope=RopeRule(
            1_000_000.0,
            grows=True,
            missing={
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        norm_eps=1e-5,
    ),
    "gemma3_text": Family(
        sizes=_GEMMA | {"vocab_size": 262_208, "max_position_embeddings": 131_072},
        gguf="gemma3",
        # transformers writes the last one beside `layer_types`, and does not read it.
        fields=frozenset(
            {
                "query_pre_attn_scalar",
                "rope_local_base_freq",
                "sliding_window_pattern",
                "_sliding_window_pattern",
            }
        ),
        window=WindowRule(size=4096, listed=True, period=6, rope_theta=10_000.0),
        rope=RopeRule(1_000_000.0),
        norms=_NORMS_AROUND,
        norm_offset=1.0,
        activation=("hidden_activation", Activation.GELU),
        qk_norm=QkNorm.HEAD,
        scaled_embedding=True,
        tied=True,
    ),
    "phi3": Family(
        sizes={
            "vocab_size": 32_064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
        },
        gguf="phi3",
        window=WindowRule(size=None),
        rope=RopeRule(partial=1.0),
        norm_eps=1e-5,
        fused=(_QKV, _GATE_UP),
    ),
    "olmo2": Family(sizes=_OLMO, gguf="olmo2", norm_eps=1e-5, norms=_NORMS_AFTER, qk_norm=QkNorm.ALL),
    "olmo3": Family(
        sizes=_OLMO,
        gguf="olmo2",
        window=WindowRule(size=4096, listed=True, period=4, rope_theta=500_000.0),
        rope=RopeRule(500_000.0),
        norm_eps=1e-5,
        norms=_NORMS_AFTER,
        qk_norm=QkNorm.ALL,
    ),
    "mixtral": Family(
        sizes=_MISTRAL,
        gguf="llama",
        window=WindowRule(size=None),
        rope=RopeRule(1_000_000.0),
        norm_eps=1e-5,
        mixture=MixtureRule(8, 2, "intermediate_size"),
        renamed=(
            ("mlp.", "block_sparse_moe."),
            ("gate_proj", "w1"),
            ("up_proj", "w3"),
            ("down_proj", "w2"),
        ),
        gguf_pairs=True,
    ),
    "gpt_oss": Family(
        sizes={
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
        },
        gguf="",
        fields=frozenset({"initial_context_length", "swiglu_limit"}),
        window=WindowRule(size=128, listed=True, period=2),
        biases=BiasRule(qkv=("attention_bias", True), output=("attention_bias", True)),
        rope=RopeRule(
            150_000.0,
            missing={
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        ),
        norm_eps=1e-5,
        mixture=MixtureRule(128, 4, "intermediate_size", clamped=True),
        sinks=True,
        renamed=(("mlp.gate.", "mlp.router."),),
    ),
    "qwen2": Family(sizes=_QWEN, gguf="qwen2", window=_QWEN_WINDOW, biases=_QWEN_BIASES),
    "qwen3": Family(sizes=_QWEN | {"head_dim": 128}, gguf="qwen3", window=_QWEN_WINDOW, qk_norm=QkNorm.HEAD),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": Family(
        sizes=_QWEN | {"head_dim": 128, "max_position_embeddings": 128_000},
        gguf="qwen3vl",
        rope=RopeRule(500_000.0, sections=True),
        qk_norm=QkNorm.HEAD,
    ),
    "qwen3_moe": Family(
        sizes=_QWEN
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
        },
        gguf="qwen3moe",
        window=WindowRule(size=4096, flagged=True),
        qk_norm=QkNorm.HEAD,
        mixture=MixtureRule(128, 8, "moe_intermediate_size", chosen=True),
    ),
}
"""By `model_type` of config.json, which `ModelSpec.architecture` is as well."""
