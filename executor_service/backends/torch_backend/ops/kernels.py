"""`Kernels`: the operations of a model, and `PlainKernels`, their implementation in plain torch.

`Model` is the same for all kernels. Tests compare other kernels with `PlainKernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight, plain
from executor_service.backends.torch_backend.ops.drawing import Filters, draw, exclude
from executor_service.backends.torch_backend.ops.low_rank import LinearChange, LowRankKernels, PlainLowRank
from executor_service.backends.torch_backend.ops.page_format import LayerCache, get, plain_cache, put
from executor_service.backends.torch_backend.ops.quantized import Format, QuantizedLinear
from executor_service.backends.torch_backend.ops.rank_sums import sum_in_order
from executor_service.backends.torch_backend.ops.row_tensors import Batch
from executor_service.backends.torch_backend.ops.sampler import Picker
from executor_service.backends.torch_backend.ops.stacked_experts import SumExperts, route
from executor_service.contract.masks import Masks


class Linear(Protocol):
    """x W^T + b, and what adapters change in it: `change`, one of the step's `LayerChanges`, or None."""

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, change: Any = None
    ) -> torch.Tensor:
        """[rows, k] to [rows, n]; with `add_to` [rows, n] the result is added to it, in place."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, [ids, k]."""

    def bytes(self) -> int:
        """Bytes of the weights."""


class GatedLinear(Protocol):
    """activation(x G^T) * (x U^T), and what adapters change in both linear layers."""

    def __call__(self, x: torch.Tensor, change: Any = None) -> torch.Tensor:
        """[rows, k] to [rows, n]."""

    def bytes(self) -> int:
        """Bytes of the weights."""


NONE = torch.empty(0)
"""In the place of weights that a layer does not have."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all layers' attention has in common: the work of a batch follows from it."""

    heads_per_kv_head: int
    head_dim: int
    windows: tuple[int, ...] = (0,)  # of the layers, each once; see `AttentionWeights.window`
    kv_heads: int = 1  # of this rank


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Parameters of one layer's attention; tensors are fp32."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    cos: torch.Tensor  # [context, half of the rotated elements, which come first in a head]
    sin: torch.Tensor  # the same
    q_norm: torch.Tensor  # [head_dim], or [0]: none
    k_norm: torch.Tensor  # the same
    scale: float  # of scores
    window: int = 0  # tokens that a query sees, up to its own; 0: all
    query_scales: torch.Tensor = NONE  # [context]: of the rotated queries of each position, or [0]: all are 1
    query_gains: torch.Tensor = NONE  # [head_dim]: of the rotated queries' elements, or [0]: all are 1
    score_cap: float = 0.0  # scores s become cap * tanh(s / cap), if it is not 0
    sinks: torch.Tensor = NONE  # [heads]: scores that take a part of the weights and give no value, or [0]

    @property
    def is_plain(self) -> bool:
        """Whether scores are neither capped nor beside a sink."""
        return not self.score_cap and not len(self.sinks)


@dataclass(frozen=True, slots=True)
class Block:
    """Weights and layers of one transformer block with a gated MLP; a norm that a model lacks is None."""

    attention_norm: torch.Tensor | None  # of the attention's input
    qkv: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None  # of all heads together, not as in `attention` of each
    attention: AttentionWeights
    output: Linear
    output_norm: torch.Tensor | None  # of what attention adds to the residual
    mlp_norm: torch.Tensor | None
    gated: GatedLinear
    down: Linear
    down_norm: torch.Tensor | None


class RecordedBlocks(Protocol):
    """All blocks of a model, for batches of up to `max_tokens` tokens."""

    max_tokens: int

    def __call__(
        self, x: torch.Tensor, prepared: Any, caches: Sequence[LayerCache], changes: Any = None
    ) -> torch.Tensor:
        """Apply all blocks to x [tokens, hidden], bitwise as one by one. Result valid until the next call.

        `changes`: the `StepChanges` of these kernels' `low_rank`, if there are any.
        """


class Kernels(Picker, Protocol):
    """One set of operations for one device and dtype."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype  # of keys and values
    sum_experts: SumExperts | None  # of experts with stacked weights; None: one by one they are faster

    @property
    def low_rank(self) -> LowRankKernels | None:
        """Adapters of its linear layers; None: it has none."""

    def step(self) -> AbstractContextManager[None]:
        """A context for one step's operations, e.g. to keep CPU threads awake between them."""

    def close(self) -> None:
        """End the threads, if any."""

    def keeps(self, weight: ScaledNumbers) -> bool:
        """Whether linear layers multiply these numbers as they are; others are dequantized first."""

    def linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> Linear:
        """A linear layer whose weight is the parts [n_i, k], one after the other."""

    def head(self, weight: Weight) -> Linear:
        """The output layer; its results may be wider than the dtype."""

    def gated(
        self,
        gate: Weight,
        up: Weight,
        activation: Activation = Activation.SILU,
        bias: torch.Tensor | None = None,
    ) -> GatedLinear:
        """The first half of a gated MLP; bias: of gate, then of up."""

    def route(
        self, logits: torch.Tensor, count: int, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, and their shares: see `stacked_experts.route`."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """RMSNorm (Zhang, Sennrich 2019) of each row; with `add_to` it is added to that, in place."""

    def sum_parts(self, parts: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of parts [parts, rows, n], [rows, n], in their order, in fp32, rounded once to their dtype.

        With `add_to` it is added to that, in place. A row does not depend on the others.
        """

    def new_cache(self, pages: int, page_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        """Storage for one layer."""

    def prepare(self, batch: Batch, shape: AttentionShape) -> Any:
        """The batch as `attention` reads it; made once per step."""

    def attention(
        self, qkv: torch.Tensor, cache: LayerCache, prepared: Any, w: AttentionWeights
    ) -> torch.Tensor:
        """Norm and rotate q and k, write k and v into their pages, attend over the block tables.

        qkv [tokens, (heads + 2 kv_heads) * head_dim] is overwritten; returns [tokens, heads * head_dim].
        """

    def record(self, blocks: Sequence[Block], eps: float) -> RecordedBlocks | None:
        """All blocks as one callable where that is faster than single operations, else None."""


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, w: AttentionWeights
) -> torch.Tensor:
    """Attention of one row in plain torch, [tokens, heads * head_dim].

    queries [heads, tokens, head_dim]; keys and values [kv_heads, keys, head_dim]; seen: [tokens, keys].
    """
    if w.is_plain:
        out = functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=seen, enable_gqa=True, scale=w.scale
        )[0]
        return out.transpose(0, 1).flatten(1)
    group = w.heads // w.kv_heads
    keys, values = (x.repeat_interleave(group, 0).float() for x in (keys, values))
    scores = queries.float() @ keys.transpose(1, 2) * w.scale
    if w.score_cap:
        scores = w.score_cap * torch.tanh(scores / w.score_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if len(w.sinks):
        sinks = w.sinks[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return (weights @ values).to(queries.dtype).transpose(0, 1).flatten(1)


class PlainLinear:
    """x W^T + b through F.linear."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, change: LinearChange | None = None
    ) -> torch.Tensor:
        out = functional.linear(x, self.weight, self._bias)
        if change is not None:
            change.add(x, out)
        return out if add_to is None else add_to.add_(out)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]

    def bytes(self) -> int:
        return self.weight.nbytes


def join(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of the left half of each row times its right half."""
    return activation.join(both)


class PlainGated:
    """activation(x G^T) * (x U^T), from one linear layer over [G; U] and a function that joins the halves."""

    def __init__(
        self, both: Linear, join: Callable[[torch.Tensor, Activation], torch.Tensor], activation: Activation
    ) -> None:
        self._both, self._join, self._activation = both, join, activation

    def __call__(self, x: torch.Tensor, change: LinearChange | None = None) -> torch.Tensor:
        return self._join(self._both(x, change=change), self._activation)

    def bytes(self) -> int:
        return self._both.bytes()


class PlainKernels:
    """Any device and dtype in plain torch: attention gathers each row's pages. Correct, not fast.

    With `form`, all linear layers but the output layer have 8-bit weights and quantized inputs.
    """

    sum_experts: SumExperts | None = None

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        form: Format | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`cache_dtype`: an 8-bit format of `page_format`; None: `dtype`."""
        self.device, self.dtype, self.form = device, dtype, form
        self.cache_dtype = cache_dtype or dtype
        self.low_rank: LowRankKernels | None = PlainLowRank(device, dtype)

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""

    def keeps(self, weight: ScaledNumbers) -> bool:
        return self.form is not None and weight.by_row and weight.numbers.dtype == self.form.dtype

    def linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> Linear:
        if self.form is not None:
            return QuantizedLinear(parts, bias, self.form, self.device, self.dtype)
        whole = torch.cat([plain(part) for part in parts])
        return PlainLinear(self._put(whole), None if bias is None else self._put(bias))

    def head(self, weight: Weight) -> Linear:
        return PlainLinear(self._put(plain(weight)), None)

    def gated(
        self,
        gate: Weight,
        up: Weight,
        activation: Activation = Activation.SILU,
        bias: torch.Tensor | None = None,
    ) -> GatedLinear:
        return self.gate(self.linear([gate, up], bias), activation)

    def gate(self, both: Linear, activation: Activation) -> GatedLinear:
        """The gated product of a layer that has the gate's rows, then those of up."""
        return PlainGated(both, self.join, activation)

    def route(
        self, logits: torch.Tensor, count: int, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, count, renormalize=renormalize)

    def join(self, both: torch.Tensor, activation: Activation) -> torch.Tensor:
        return join(both, activation)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        wide = x.float()
        normed = (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)
        return normed if add_to is None else add_to.add_(normed)

    def sum_parts(self, parts: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        return sum_in_order(parts, add_to)

    def new_cache(self, pages: int, page_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        return plain_cache(pages, page_size, kv_heads, head_dim, self.cache_dtype, self.device)

    def prepare(self, batch: Batch, shape: AttentionShape) -> Any:
        return batch

    def attention(
        self, qkv: torch.Tensor, cache: LayerCache, prepared: Any, w: AttentionWeights
    ) -> torch.Tensor:
        q, k, v = self.rotated(qkv, prepared.positions, w)
        put(cache, (prepared.pages, prepared.slots), k, v)
        outs, first = [], 0
        for table, start, count in zip(prepared.tables, prepared.starts, prepared.counts, strict=True):
            length, page_size = int(start + count), cache.k.shape[1]
            before = max(int(start) - w.window + 1, 0) // page_size if w.window else 0  # pages nobody sees
            seen = slice(before, -(-length // page_size))
            positions = torch.arange(before * page_size, length, device=self.device)
            keys, values = (x[: len(positions)].transpose(0, 1) for x in get(cache, table[seen], self.dtype))
            distance = torch.arange(int(start), length, device=self.device)[:, None] - positions[None, :]
            visible = (distance >= 0) & (distance < (w.window or length))
            queries = q[first : first + count].transpose(0, 1)
            outs.append(attend(queries, keys, values, visible, w))
            first += count
        return torch.cat(outs)

    def rotated(
        self, qkv: torch.Tensor, positions: torch.Tensor, w: AttentionWeights
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys, normed and rotated, and values, as heads: each [tokens, its heads, head_dim]."""
        heads = qkv.view(qkv.shape[0], -1, w.head_dim)
        q, k, v = torch.split(heads, [w.heads, w.kv_heads, w.kv_heads], dim=1)
        cos, sin = w.cos[positions], w.sin[positions]
        q, k = (self._rotate(x, cos, sin, n, w.eps) for x, n in ((q, w.q_norm), (k, w.k_norm)))
        if len(w.query_scales):
            q = q * w.query_scales[positions, None, None].to(q.dtype)
        if len(w.query_gains):
            q = q * w.query_gains.to(q.dtype)
        return q, k, v

    def record(self, blocks: Sequence[Block], eps: float) -> RecordedBlocks | None:
        return None

    def _rotate(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if len(norm):
            x = self.rms_norm(x, norm, eps)
        half, cos, sin = cos.shape[-1], cos[:, None], sin[:, None]
        a, b, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(self.dtype)

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)

    def exclude(self, logits: torch.Tensor, places: NDArray[np.int64], masks: Masks) -> None:
        exclude(logits, places, masks)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def log_sum_exp(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.logsumexp(-1)

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: NDArray[np.float32],
        keys: NDArray[np.uint64],
        filters: Filters,
    ) -> torch.Tensor:
        return draw(logits, temperatures, keys, filters)
