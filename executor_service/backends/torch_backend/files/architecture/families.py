"""`FAMILIES`: all architectures that load. Those without windows and experts are described here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from executor_service.backends.torch_backend.files.architecture.family import BiasRule, Family
from executor_service.backends.torch_backend.files.architecture.family_shared import (
    GATE_UP,
    GLM,
    GLM_ENDS,
    LLAMA,
    MLP_BIASES,
    NORMS_AFTER,
    OLMO,
    POST_NORM,
    QWEN,
    UNUSED_HUNYUAN,
    UNUSED_MIXERS,
)
from executor_service.backends.torch_backend.files.architecture.mixture_families import MIXTURES
from executor_service.backends.torch_backend.files.architecture.rope.from_config import RopeRule
from executor_service.backends.torch_backend.files.architecture.spec import NormNames, QkNorm
from executor_service.backends.torch_backend.files.architecture.windowed_families import WINDOWED

_GLM_BIASES = BiasRule(qkv=("attention_bias", True), output=("", False))

_GLM = Family(
    sizes=GLM,
    gguf="chatglm",
    gguf_ends=GLM_ENDS,
    biases=_GLM_BIASES,
    rope=RopeRule(partial=0.5),
    norm_eps=1.5625e-7,
    fused=(GATE_UP,),
    pairs=True,
    gguf_pairs=True,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        sizes=LLAMA,
        gguf="llama",
        biases=MLP_BIASES,
        gguf_pairs=True,
    ),
    "granite": Family(sizes=LLAMA, gguf="granite", biases=MLP_BIASES, multipliers=True, gguf_pairs=True),
    "granitemoehybrid": Family(  # of attention and dense layers alone
        sizes=LLAMA | {"shared_intermediate_size": 1024},
        gguf="granite",
        fields=UNUSED_MIXERS | {"position_embedding_type"},
        expected={"normalization_function": ("rmsnorm",)},
        inner_field="shared_intermediate_size",
        multipliers=True,
        rotated_if_named=True,
        fused=(GATE_UP,),
        renamed=(
            ("mlp.gate_up_proj", "shared_mlp.input_linear"),
            ("mlp.down_proj", "shared_mlp.output_linear"),
        ),
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
        gguf_renamed=POST_NORM,
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
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        gguf="glm4",
        norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    ),
    "olmo2": Family(sizes=OLMO, gguf="olmo2", norm_eps=1e-5, norms=NORMS_AFTER, qk_norm=QkNorm.ALL),
    "qwen3_vl_text": Family(
        sizes=QWEN | {"head_dim": 128, "max_position_embeddings": 128_000},
        gguf="qwen3vl",
        rope=RopeRule(500_000.0, sections=True),
        qk_norm=QkNorm.HEAD,
    ),
    "hunyuan_v1_dense": Family(
        sizes=LLAMA | {"vocab_size": 290_943},
        gguf="hunyuan-dense",
        fields=UNUSED_HUNYUAN,
        expected={
            "add_classification_head": (False,),
            "use_cla": (False,),  # layers share no keys and values
            "use_rotary_pos_emb": (True,),
        },
        rope=RopeRule(stretched=True),
        norm_eps=1e-5,
        qk_norm=QkNorm.ROTATED,
        renamed=(("q_norm", "query_layernorm"), ("k_norm", "key_layernorm")),
    ),
    **WINDOWED,
    **MIXTURES,
}
"""By `model_type` of config.json, which `ModelSpec.architecture` is as well."""
