"""`ModelSpec`: the architecture and the sizes of a decoder-only model.

`config_json.py` and `gguf_spec.py` read it from files. A model that cannot be computed is refused there and
here, with a ModelError that names the reason, before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum, auto
from typing import NamedTuple

from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.architecture.rope.spec import UNROTATED, RopeSpec
from executor_service.contract.model_error import ModelError
from executor_service.files.fields import Fields

MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_END_IDS = 64
"""End ids of a model. A request sends them with its own stop ids, and the executor takes 128 together."""


class NormNames(NamedTuple):
    """The RMSNorms of a block, by the names of their tensors in a layer; "": the model has none there."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""  # of what attention adds to the residual
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


class Scales(NamedTuple):
    """What multiplies a model's numbers.

    What layers add to the embeddings may have a scale, too (Granite). The residual is then held divided by
    it, so that nothing has to be multiplied: the embeddings' scale is divided, and as the norms divide by
    the root of a mean square and `eps`, `eps` by the square.
    """

    embedding: float
    residual: float
    scores: float
    logits: float


class QkNorm(StrEnum):
    """RMSNorm on queries and keys."""

    NONE = auto()
    HEAD = auto()  # of each head
    ALL = auto()  # of all heads together
    ROTATED = auto()  # of each head, after its rotation


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """Layers in which a token sees only the last `size` tokens, itself among them."""

    size: int
    layers: frozenset[int]
    rope: RopeSpec  # of these layers


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts: softmax over all of them, then the `experts_per_token` likeliest.

    `clamped` (gpt-oss): the router and the experts have biases, and `Activation.CLAMPED`.
    `corrected` (GLM-4-MoE): shares are sigmoids, and experts are chosen by their sum with a correction.
    """

    experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool  # the weights of a token's experts are scaled to a sum of 1
    sparse_layers: frozenset[int]  # the layers with experts; others have a dense MLP
    clamped: bool = False
    corrected: bool = False
    share_scale: float = 1.0  # of all shares, after they were scaled to a sum of 1
    shared_size: int = 0  # neurons of an expert that all tokens have; 0: there is none
    shared_gate: bool = False  # its result is multiplied by a sigmoid of its own


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary attention with grouped KV heads, a gated MLP."""

    architecture: str  # one of `families.FAMILIES`
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int  # tokens
    norm_eps: float
    norms: NormNames
    norm_offset: float  # added to the stored weights of all norms
    embedding_scale: float  # of the first layer's input; what layers add to it has no scale
    attention_scale: float  # of scores
    activation: Activation
    rope: RopeSpec  # of the layers without a window
    rotary_dim: int  # rotated elements at the start of each head
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: QkNorm
    tied_embeddings: bool  # the output layer is the embedding; also of a model without one
    window: WindowSpec | None  # None: a token sees all tokens before it, in all layers
    moe: MoeSpec | None
    eos_token_ids: tuple[int, ...]
    unrotated: frozenset[int] = frozenset()  # layers without a rotary embedding
    mlp_bias: bool = False
    sinks: bool = (
        False  # each query head has a score more, which takes its part of the weights and has no value
    )
    score_cap: float = 0.0  # attention scores s become cap * tanh(s / cap), if it is not 0
    logit_cap: float = 0.0  # logits likewise, after their scale
    logit_scale: float = 1.0
    labels: int = 0  # scores of its classification head, in place of an output layer; 0: it has none

    @property
    def vector_size(self) -> int:
        """Values of a text's vector: of a final hidden state, or the scores of a classification head."""
        return self.labels or self.hidden_size

    def rope_of(self, layer: int) -> RopeSpec:
        """The rotary embedding of a layer."""
        if layer in self.unrotated:
            return UNROTATED
        return self.window.rope if self.window is not None and layer in self.window.layers else self.rope

    def window_of(self, layer: int) -> int:
        """How many tokens a token sees in this layer, itself among them; 0: all before it."""
        return self.window.size if self.window is not None and layer in self.window.layers else 0

    def serving(self, max_context: int | None) -> ModelSpec:
        """The same model for sequences of up to `max_context` tokens. Raises ModelError if it is too long."""
        if max_context is not None and max_context > self.context_length:
            raise ModelError(f"--max-context {max_context}: the model has only {self.context_length} tokens")
        return self if max_context is None else replace(self, context_length=max_context)


def checked(f: Fields, spec: ModelSpec) -> ModelSpec:
    """The spec. Raises ModelError, with the place that `f` names, if its sizes contradict each other."""
    if spec.heads % spec.kv_heads:
        raise f.fault(
            f"{spec.heads} heads (num_attention_heads) can't be shared by {spec.kv_heads} KV heads"
            " (num_key_value_heads)"
        )
    if spec.head_dim % 2:
        raise f.fault(f"head_dim {spec.head_dim} is odd; rotary embedding needs pairs")
    if spec.rotary_dim % 2 or not 0 < spec.rotary_dim <= spec.head_dim:
        raise f.fault(
            f"partial_rotary_factor rotates {spec.rotary_dim} elements of a head of {spec.head_dim}: no pairs"
        )
    if spec.moe and spec.moe.experts_per_token > spec.moe.experts:
        raise f.fault(
            f"num_experts_per_tok {spec.moe.experts_per_token} is above num_experts {spec.moe.experts}"
        )
    return spec
