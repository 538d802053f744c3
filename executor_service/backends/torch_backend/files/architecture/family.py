"""`Family`: what all models of an architecture have in common, and their files need not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.architecture.config_windows import WindowRule
from executor_service.backends.torch_backend.files.architecture.rope.from_config import RopeRule
from executor_service.backends.torch_backend.files.architecture.spec import NormNames, QkNorm

_NORMS, _ROPE = NormNames(), RopeRule()


@dataclass(frozen=True, slots=True)
class MixtureRule:
    """How config.json describes a mixture of experts."""

    experts: int  # default, as of the next
    experts_per_token: int
    size_field: str  # of the size of an expert
    counts: tuple[str, ...] = ("num_local_experts", "num_experts")  # fields with the number of experts
    chosen: bool = False  # which layers are mixtures is read: `decoder_sparse_step`, `mlp_only_layers`
    dense_first: int | None = None  # default of `first_k_dense_replace`; None: it is not read
    scaled: bool | None = None  # default of `norm_topk_prob`; None: it is not read, and shares are scaled
    gguf_scaled: bool = True  # the same of GGUF files, where llama.cpp has another default
    clamped: bool = False  # router and experts have biases, and gpt-oss's activation
    corrected: bool = False  # shares are sigmoids, chosen with a correction, times `routed_scaling_factor`
    shared_size: str = ""  # field of the neurons of an expert that all tokens have
    shared_count: str = ""  # or of the number of such experts, which are computed as one
    shared_gate: bool = False  # its result is multiplied by a sigmoid of its own

    @property
    def own_fields(self) -> frozenset[str]:
        """The keys of `config_fields.NEUTRAL` that `config_json` reads of such a mixture."""
        own = {self.shared_size, self.shared_count, *self.counts}
        if self.dense_first is not None:
            own.add("first_k_dense_replace")
        if self.corrected:
            own |= {"routed_scaling_factor", "scoring_func", "use_routing_bias"}
        return frozenset(own)


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
    gguf: str  # `general.architecture` of GGUF files; several have one name: see `gguf_spec`
    fields: frozenset[str] = frozenset()  # that others don't have; of any value if nothing reads them
    expected: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # others, with their only values
    inner_field: str = "intermediate_size"  # of a dense MLP
    window: WindowRule | None = None
    biases: BiasRule = _BIASES
    unrotated_every: int = 0  # default of `no_rope_layer_interval`; 0: it has no such layers
    rotated_if_named: bool = False  # no layer is rotated unless `position_embedding_type` is "rope"
    rope: RopeRule = _ROPE
    norm_eps: float = 1e-6  # default of `rms_norm_eps`
    norms: NormNames = _NORMS
    norm_offset: float = 0.0  # of safetensors files; GGUF files have it in the weights
    activation: tuple[str, Activation] = ("hidden_act", Activation.SILU)  # config.json's field
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_flagged: bool = False  # there is none without `use_qk_norm`
    tied: bool = False  # default of `tie_word_embeddings`
    scaled_embedding: bool = False  # by the square root of the hidden size
    multipliers: bool = False  # of embeddings, of what layers add to them, of scores and logits (Granite)
    caps: tuple[float, float] | None = None  # defaults, of scores and logits; None: it has none
    mixture: MixtureRule | None = None
    sinks: bool = False  # each head has a score beside those of the tokens it sees
    fused: tuple[str, ...] = ()  # tensors with q, k and v, or gate and up, in one: keys of `stored_names`
    renamed: tuple[tuple[str, str], ...] = ()  # parts of our tensors' names, and the files': in this order
    # Rows of q and k that are rotated together stand side by side in directories, and in GGUF files.
    # Norms of q and k are not reordered: not for a family that has them.
    pairs: bool = False
    gguf_pairs: bool = False
    gguf_ends: tuple[str, ...] = ()  # tokens that end an output, beside those that GGUF files name
    gguf_renamed: tuple[
        tuple[str, str], ...
    ] = ()  # a tensor's usual name in a layer, and the one of this family

    @property
    def own_fields(self) -> frozenset[str]:
        """The keys of `config_fields.NEUTRAL` that `config_json` reads of such a model, and `fields`."""
        own = {key for key, _ in (self.biases.qkv, self.biases.output, self.biases.mlp)}
        if self.multipliers:
            own |= {f"{what}_multiplier" for what in ("embedding", "residual", "attention")} | {
                "logits_scaling"
            }
        if self.caps is not None:
            own |= {"attn_logit_softcapping", "final_logit_softcapping"}
        if self.mixture is not None:
            own |= self.mixture.own_fields
        if self.unrotated_every:
            own |= {"no_rope_layers", "no_rope_layer_interval"}
        return self.fields | own | frozenset(self.expected)
