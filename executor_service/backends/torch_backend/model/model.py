"""`Model`: a decoder-only transformer over a batch of mixed rows, the same for every device.

The rows' tokens are concatenated: linear layers run once over all tokens, attention runs per row, and logits
are computed for the output positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from executor_service.backends.base import Progress
from executor_service.backends.torch_backend.files.architecture.rope.tables import RopeTables, rope_tables
from executor_service.backends.torch_backend.files.architecture.spec import QkNorm
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight
from executor_service.backends.torch_backend.files.stored_names import (
    CLASSIFIER,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    SINKS,
)
from executor_service.backends.torch_backend.files.weights import Checkpoint
from executor_service.backends.torch_backend.model.mlp import MixtureMlp, Mlp
from executor_service.backends.torch_backend.model.norms import Norms
from executor_service.backends.torch_backend.model.shard import Shard, Whole
from executor_service.backends.torch_backend.ops.kernels import (
    AttentionShape,
    AttentionWeights,
    Block,
    Kernels,
    Linear,
    PlainLinear,
)
from executor_service.backends.torch_backend.ops.low_rank import NO_CHANGES, StepChanges
from executor_service.backends.torch_backend.ops.page_format import LayerCache
from executor_service.backends.torch_backend.ops.row_tensors import Batch

Attend = Callable[[torch.Tensor, LayerCache, Any, AttentionWeights], torch.Tensor]
"""As `Kernels.attention`."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block; the norms are those of `Block`."""

    attention_norm: torch.Tensor | None
    qkv: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    attention: AttentionWeights
    output: Linear
    output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Mlp | MixtureMlp


class Model:
    """The weights, stored as `kernels` need them, and the forward pass."""

    def __init__(
        self, checkpoint: Checkpoint, kernels: Kernels, progress: Progress, shard: Shard | None = None
    ) -> None:
        """Reads all weights of a shard's checkpoint, a layer at a time. Raises ModelError."""
        self.spec, self.kernels, self._shard = checkpoint.spec, kernels, shard or Whole()
        s = self.spec
        self._norms = Norms(kernels, s.norm_eps)
        self._most_tokens = self._most_outputs = 0  # of a forward so far
        ropes = {
            rope: rope_tables(rope, s.rotary_dim, s.context_length).to(kernels.device)
            for rope in {s.rope_of(i) for i in range(s.layers)}
        }
        self.layers: list[Layer] = []
        for i in range(s.layers):
            progress("loading weights", i / (s.layers + 1))
            self.layers.append(self._read_layer(checkpoint, i, ropes[s.rope_of(i)]))
        self.norm = self._weight(checkpoint, FINAL_NORM.removesuffix(".weight"))
        # Rounded as the embedding is.
        self._embedding_scale = torch.tensor(s.embedding_scale).to(kernels.dtype).item()
        embedding = checkpoint.read_weight(EMBEDDING)
        # Tied, the embedding is read out of the output layer's weights: they exist once.
        tied = s.tied_embeddings
        self.head: Linear = kernels.head(embedding if tied else checkpoint.read_weight(HEAD))
        self.embedding = None if tied else _embedding(embedding, kernels)
        self._classifier = kernels.head(checkpoint.read_weight(CLASSIFIER)) if s.labels else None
        blocks = [
            Block(
                layer.attention_norm, layer.qkv, layer.qk_norms, layer.attention, layer.output,
                layer.output_norm, layer.mlp_norm, layer.mlp.gated, layer.mlp.down, layer.mlp.norm,
            )
            for layer in self.layers
            if isinstance(layer.mlp, Mlp)
        ]  # fmt: skip
        dense = len(blocks) == len(self.layers)
        self._recorded = kernels.record(blocks, s.norm_eps) if dense else None
        progress("loading weights", 1.0)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a step: the host reads nothing from the device meanwhile."""
        return all(isinstance(layer.mlp, Mlp) or layer.mlp.experts.capturable for layer in self.layers)

    @property
    def attention_shape(self) -> AttentionShape:
        """What the work of attention follows from."""
        s = self.spec
        windows = dict.fromkeys(s.window_of(i) for i in range(s.layers))
        return AttentionShape(s.heads // s.kv_heads, s.head_dim, tuple(windows), s.kv_heads)

    def new_caches(self, pages: int, page_size: int) -> list[LayerCache]:
        """KV storage of every layer."""
        s = self.spec
        return [self.kernels.new_cache(pages, page_size, s.kv_heads, s.head_dim) for _ in self.layers]

    def prepare(self, batch: Batch) -> Any:
        """The batch as the layers' attention reads it; see `Kernels.prepare`."""
        return self.kernels.prepare(batch, self.attention_shape)

    def hidden(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        prepared: Any,
        caches: Sequence[LayerCache],
        changes: StepChanges | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """The final hidden states [states, hidden] of the tokens that `states` names, after the norm.

        tokens [tokens] and what `prepare` made of their batch; states [states], in ascending order; int64, or
        int32 on CUDA.
        `changes`: what adapters change for these tokens. `attend`: in place of the kernels' attention.
        """
        residual = self.residual(tokens, prepared, caches, changes, attend)
        return self.final(residual if len(states) == len(tokens) else residual[states])

    def residual(
        self,
        tokens: torch.Tensor,
        prepared: Any,
        caches: Sequence[LayerCache],
        changes: StepChanges | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """What the layers make of the tokens, [tokens, hidden], before the final norm.

        It may be overwritten by the next call. `changes`, `attend`: as for `hidden`.
        """
        self._most_tokens = max(self._most_tokens, len(tokens))
        kernels, norms = self.kernels, self._norms
        x = self._shard.embed(kernels, self._embedding_rows, tokens)
        if self._recorded is not None and attend is None and len(x) <= self._recorded.max_tokens:
            return self._recorded(x, prepared, caches, changes)
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            change = NO_CHANGES if changes is None else changes.of_layer(i)
            qkv = layer.qkv(norms.of(x, layer.attention_norm), change=change.qkv)
            if layer.qk_norms is not None:
                self._norm_together(qkv, layer.qk_norms)
            attended = (attend or kernels.attention)(qkv, cache, prepared, layer.attention)
            norms.add_linear(layer.output, attended, layer.output_norm, x, change.output)
            layer.mlp.add(norms.of(x, layer.mlp_norm), x, change)
        return x

    def final(self, residual: torch.Tensor) -> torch.Tensor:
        """The final norm of some rows of `residual`, each on its own."""
        return self._norms.of(residual, self.norm)

    def vectors(self, hidden: torch.Tensor) -> torch.Tensor:
        """What clients get for final hidden states: themselves, or a head's scores [rows, labels]; fp32."""
        return (hidden if self._classifier is None else self._classifier(hidden)).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [rows, vocabulary]; on a shard, its part of the vocabulary."""
        self._most_outputs = max(self._most_outputs, len(hidden))
        logits, s = self.head(hidden).float(), self.spec
        if s.logit_scale != 1:
            logits = logits * s.logit_scale
        return logits if s.logit_cap == 0 else s.logit_cap * torch.tanh(logits / s.logit_cap)

    def shared_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [rows, whole vocabulary], on every rank."""
        return self._shard.shared_logits(self.logits(hidden))

    @property
    def activation_bytes(self) -> int:
        """Bytes for reports: what the largest forward so far held at once, estimated by its shapes."""
        s, wide = self.spec, self.kernels.dtype.itemsize
        heads, inner = s.heads * s.head_dim, s.intermediate_size
        if s.moe is not None:
            inner = max(inner, s.moe.experts_per_token * s.moe.intermediate_size + s.moe.shared_size)
        attention = 2 * heads + 2 * s.kv_heads * s.head_dim  # queries, keys and values, and what is attended
        layer = 2 * s.hidden_size + max(
            attention, 3 * inner
        )  # the residual, its norm, and attention or the MLP
        logits = 2 * 4 * s.vocab_size  # fp32, and a copy that is sampled
        return max(
            self._most_tokens * layer * wide,
            self._most_tokens * s.hidden_size * wide + self._most_outputs * logits,
        )

    def bytes(self) -> int:
        """Bytes of the weights."""
        return sum(self._sizes())

    def _sizes(self) -> Iterator[int]:
        yield self.head.bytes()
        if self._classifier is not None:
            yield self._classifier.bytes()
        if self.embedding is not None:
            yield self.embedding.bytes()
        for layer in self.layers:
            yield layer.qkv.bytes() + layer.output.bytes() + layer.mlp.bytes()

    def _embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        rows = (self.head if self.embedding is None else self.embedding).rows(ids).to(self.kernels.dtype)
        return rows if self._embedding_scale == 1 else rows * self._embedding_scale

    def _norm_together(self, qkv: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Norm the queries of all heads of a token as one vector, and its keys as another, in place."""
        first = 0
        for weight in weights:
            part = qkv[:, first : first + len(weight)]
            part.copy_(self._shard.rms_norm(self.kernels, part, weight, self.spec.norm_eps))
            first += len(weight)

    def _norm(self, checkpoint: Checkpoint, prefix: str, name: str) -> torch.Tensor | None:
        """The weight of a norm; None where its name is ""."""
        return self._weight(checkpoint, prefix + name) if name else None

    def _weight(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        weight = checkpoint.read(name + ".weight").float() + self.spec.norm_offset
        return weight.to(self.kernels.device)

    def _read_layer(self, checkpoint: Checkpoint, i: int, rope: RopeTables) -> Layer:
        s, prefix = self.spec, f"model.layers.{i}."
        parts = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        bias = torch.cat([checkpoint.read(part + ".bias") for part in parts]) if s.qkv_bias else None
        none = torch.empty(0, device=self.kernels.device)
        q_norm, k_norm = (
            none if s.qk_norm is QkNorm.NONE else self._weight(checkpoint, f"{prefix}self_attn.{part}_norm")
            for part in "qk"
        )
        gains = none
        if s.qk_norm is QkNorm.ROTATED:
            # A rotation keeps a vector's length: only the norms' weights have to come after it, and scores
            # are the same if queries have those of the keys as well.
            gains, q_norm, k_norm = q_norm * k_norm, torch.ones_like(q_norm), torch.ones_like(k_norm)
        of_each = s.qk_norm is not QkNorm.ALL
        attention = AttentionWeights(
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            eps=s.norm_eps,
            cos=rope.cos,
            sin=rope.sin,
            q_norm=q_norm if of_each else none,
            k_norm=k_norm if of_each else none,
            scale=s.attention_scale,
            window=s.window_of(i),
            query_scales=rope.query_scales,
            query_gains=gains,
            score_cap=s.score_cap,
            sinks=checkpoint.read(prefix + SINKS).float().to(self.kernels.device) if s.sinks else none,
        )
        common = self.kernels, checkpoint, prefix + "mlp.", self._norms
        after_mlp = self._norm(checkpoint, prefix, s.norms.after_mlp)
        sparse = s.moe is not None and i in s.moe.sparse_layers
        mlp = (
            MixtureMlp(*common, after_mlp, s.moe, self._shard)
            if s.moe is not None and sparse
            else Mlp(*common, after_mlp, self._shard)
        )
        return Layer(
            attention_norm=self._norm(checkpoint, prefix, s.norms.before_attention),
            qkv=self.kernels.linear([checkpoint.read_weight(part + ".weight") for part in parts], bias),
            qk_norms=(q_norm, k_norm) if s.qk_norm is QkNorm.ALL else None,
            attention=attention,
            output=self._shard.summed(
                self.kernels,
                self.kernels.linear(
                    [checkpoint.read_weight(prefix + "self_attn.o_proj.weight")],
                    checkpoint.read(prefix + "self_attn.o_proj.bias") if s.output_bias else None,
                ),
            ),
            output_norm=self._norm(checkpoint, prefix, s.norms.after_attention),
            mlp_norm=self._norm(checkpoint, prefix, s.norms.before_mlp),
            mlp=mlp,
        )


def _embedding(weight: Weight, kernels: Kernels) -> Linear:
    """An embedding of its own, of which only rows are read."""
    if isinstance(weight, ScaledNumbers):
        return kernels.linear([weight])
    return PlainLinear(_narrow(weight, kernels.dtype).to(kernels.device), None)


def _narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in its own dtype or in this one, whichever takes less memory."""
    return x if x.dtype.itemsize <= dtype.itemsize else x.to(dtype)
