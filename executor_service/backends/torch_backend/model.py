"""`Model`: a decoder-only transformer over a batch of mixed rows, the same for every device.

The rows' tokens are concatenated: linear layers run once over all tokens, attention runs per row, and logits
are computed for the output positions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from executor_service.backends.base import Progress
from executor_service.backends.torch_backend.batch import Batch
from executor_service.backends.torch_backend.experts import experts
from executor_service.backends.torch_backend.kernels import (
    AttentionShape,
    AttentionWeights,
    Block,
    GatedLinear,
    Kernels,
    LayerCache,
    Linear,
)
from executor_service.backends.torch_backend.low_rank import NO_CHANGES, LayerChanges, StepChanges
from executor_service.backends.torch_backend.rope.tables import rope_tables
from executor_service.backends.torch_backend.shard import Shard, Whole
from executor_service.backends.torch_backend.spec import MoeSpec
from executor_service.backends.torch_backend.weights import EMBEDDING, FINAL_NORM, HEAD, Checkpoint


class Mlp:
    """SwiGLU."""

    def __init__(self, kernels: Kernels, checkpoint: Checkpoint, prefix: str, shard: Shard) -> None:
        gate, up = (checkpoint.read(f"{prefix}{part}_proj.weight") for part in ("gate", "up"))
        self.gated: GatedLinear = kernels.gated(gate, up)
        self.down = shard.summed(kernels.linear([checkpoint.read(prefix + "down_proj.weight")]))

    def add(self, x: torch.Tensor, residual: torch.Tensor, changes: LayerChanges = NO_CHANGES) -> None:
        """residual += mlp(x)."""
        self.down(self.gated(x, change=changes.gated), add_to=residual, change=changes.down)

    def bytes(self) -> int:
        """Bytes of the weights."""
        return self.gated.bytes() + self.down.bytes()


class MixtureMlp:
    """A mixture of SwiGLU experts; a token's experts are summed in the order of their numbers.

    A shard has the whole router (`gate.weight`), and a part of each expert's `gate`, `up` and `down`.
    """

    def __init__(
        self, kernels: Kernels, checkpoint: Checkpoint, prefix: str, moe: MoeSpec, shard: Shard
    ) -> None:
        self.moe, self._shard = moe, shard
        self.router: Linear = kernels.linear([checkpoint.read(prefix + "gate.weight")])

        def read(expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            names = (f"{prefix}experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
            gate, up, down = map(checkpoint.read, names)
            return gate, up, down

        self.experts = experts(kernels, moe, checkpoint.spec.hidden_size, read)

    def add(self, x: torch.Tensor, residual: torch.Tensor, changes: LayerChanges = NO_CHANGES) -> None:
        """residual += sum of the weighted experts of each token, which adapters do not change.

        Both are [tokens, hidden].
        """
        shares, chosen = torch.softmax(self.router(x).float(), dim=-1).topk(self.moe.experts_per_token)
        if self.moe.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        # Each rank adds up its parts of the experts; then one sum over the ranks completes all of them.
        residual += self._shard.sum(self.experts(x, shares, chosen))

    def bytes(self) -> int:
        """Bytes of the weights."""
        return self.router.bytes() + self.experts.bytes()


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block."""

    attention_norm: torch.Tensor
    qkv: Linear
    attention: AttentionWeights
    output: Linear
    mlp_norm: torch.Tensor
    mlp: Mlp | MixtureMlp


class Model:
    """The weights, stored as `kernels` need them, and the forward pass."""

    def __init__(
        self, checkpoint: Checkpoint, kernels: Kernels, progress: Progress, shard: Shard | None = None
    ) -> None:
        """Reads all weights of a shard's checkpoint, a layer at a time. Raises ModelError."""
        self.spec, self.kernels, self._shard = checkpoint.spec, kernels, shard or Whole()
        s = self.spec
        rope = tuple(t.to(kernels.device) for t in rope_tables(s.rope, s.head_dim, s.context_length))
        self.layers: list[Layer] = []
        for i in range(self.spec.layers):
            progress("loading weights", i / (self.spec.layers + 1))
            self.layers.append(self._read_layer(checkpoint, i, rope[0], rope[1]))
        self.norm = self._vector(checkpoint, FINAL_NORM)
        embedding = checkpoint.read(EMBEDDING)
        # Tied, the embedding is read out of the output layer's weights: they exist once.
        tied = self.spec.tied_embeddings
        self.head: Linear = kernels.head(embedding if tied else checkpoint.read(HEAD))
        self.embedding = None if tied else _narrow(embedding, kernels.dtype).to(kernels.device)
        blocks = [
            Block(
                layer.attention_norm, layer.qkv, layer.attention, layer.output, layer.mlp_norm,
                layer.mlp.gated, layer.mlp.down,
            )
            for layer in self.layers
            if isinstance(layer.mlp, Mlp)
        ]  # fmt: skip
        dense = len(blocks) == len(self.layers)
        self._recorded = kernels.record(blocks, self.spec.norm_eps) if dense else None
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
        return AttentionShape(s.heads // s.kv_heads, s.head_dim, tuple(windows))

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
    ) -> torch.Tensor:
        """The final hidden states [states, hidden] of the tokens that `states` names, after the norm.

        tokens [tokens] and what `prepare` made of their batch; states [states]; int64, or int32 on CUDA.
        `changes`: what adapters change for these tokens.
        """
        return self.final(self.residual(tokens, prepared, caches, changes)[states])

    def residual(
        self,
        tokens: torch.Tensor,
        prepared: Any,
        caches: Sequence[LayerCache],
        changes: StepChanges | None = None,
    ) -> torch.Tensor:
        """What the layers make of the tokens, [tokens, hidden], before the final norm.

        It may be overwritten by the next call. `changes`: as for `hidden`.
        """
        kernels, eps = self.kernels, self.spec.norm_eps
        x = self._shard.embed(self._embedding_rows, tokens)
        if self._recorded is not None and len(x) <= self._recorded.max_tokens:
            return self._recorded(x, prepared, caches, changes)
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            change = NO_CHANGES if changes is None else changes.of_layer(i)
            qkv = layer.qkv(kernels.rms_norm(x, layer.attention_norm, eps), change=change.qkv)
            attended = kernels.attention(qkv, cache, prepared, layer.attention)
            layer.output(attended, add_to=x, change=change.output)
            layer.mlp.add(kernels.rms_norm(x, layer.mlp_norm, eps), x, change)
        return x

    def final(self, residual: torch.Tensor) -> torch.Tensor:
        """The final norm of some rows of `residual`, each on its own."""
        return self.kernels.rms_norm(residual, self.norm, self.spec.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [rows, vocabulary]; on a shard, its part of the vocabulary."""
        return self.head(hidden).float()

    def bytes(self) -> int:
        """Bytes of the weights."""
        return sum(self._sizes())

    def _sizes(self) -> Iterator[int]:
        yield self.head.bytes()
        yield 0 if self.embedding is None else self.embedding.nbytes
        for layer in self.layers:
            yield layer.qkv.bytes() + layer.output.bytes() + layer.mlp.bytes()

    def _embedding_rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.embedding is None:
            return self.head.rows(ids)
        return self.embedding[ids].to(self.kernels.dtype)

    def _vector(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        return checkpoint.read(name).float().to(self.kernels.device)

    def _read_layer(self, checkpoint: Checkpoint, i: int, cos: torch.Tensor, sin: torch.Tensor) -> Layer:
        s, prefix = self.spec, f"model.layers.{i}."
        parts = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        bias = torch.cat([checkpoint.read(part + ".bias") for part in parts]) if s.qkv_bias else None
        none = torch.empty(0, device=self.kernels.device)
        attention = AttentionWeights(
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            eps=s.norm_eps,
            cos=cos,
            sin=sin,
            q_norm=self._vector(checkpoint, prefix + "self_attn.q_norm.weight") if s.qk_norm else none,
            k_norm=self._vector(checkpoint, prefix + "self_attn.k_norm.weight") if s.qk_norm else none,
            scale=s.head_dim**-0.5,
            window=s.window_of(i),
        )
        sparse = s.moe is not None and i in s.moe.sparse_layers
        mlp = (
            MixtureMlp(self.kernels, checkpoint, prefix + "mlp.", s.moe, self._shard)
            if s.moe is not None and sparse
            else Mlp(self.kernels, checkpoint, prefix + "mlp.", self._shard)
        )
        return Layer(
            attention_norm=self._vector(checkpoint, prefix + "input_layernorm.weight"),
            qkv=self.kernels.linear([checkpoint.read(part + ".weight") for part in parts], bias),
            attention=attention,
            output=self._shard.summed(
                self.kernels.linear(
                    [checkpoint.read(prefix + "self_attn.o_proj.weight")],
                    checkpoint.read(prefix + "self_attn.o_proj.bias") if s.output_bias else None,
                )
            ),
            mlp_norm=self._vector(checkpoint, prefix + "post_attention_layernorm.weight"),
            mlp=mlp,
        )


def _narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in its own dtype or in this one, whichever takes less memory."""
    return x if x.dtype.itemsize <= dtype.itemsize else x.to(dtype)
