"""`Kernels`: the operations a model is made of, for fp32 and int8 on CPU and once in plain torch.

The model above them is the same everywhere; `PlainKernels` also is what the tests hold `CpuKernels` against.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from executor_service.backends.torch_backend import cpu_attention, cpu_jobs, cpu_norm
from executor_service.backends.torch_backend.batch import Batch
from executor_service.backends.torch_backend.cpu_pool import Pool
from executor_service.backends.torch_backend.drawing import Filters, draw
from executor_service.backends.torch_backend.packed import PackedGated, PackedLinear
from executor_service.backends.torch_backend.packed_int8 import Int8Gated, Int8Linear, Scratch
from executor_service.backends.torch_backend.tile import LANES


class Linear(Protocol):
    """x W^T + b."""

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, k] to [rows, n]; with `add_to` [rows, n] the result is added to it, in place."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W, [ids, k]."""

    def bytes(self) -> int:
        """Memory of the weights."""


class Gated(Protocol):
    """silu(x G^T) * (x U^T)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, k] to [rows, n]."""

    def bytes(self) -> int:
        """Memory of the weights."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """K and V of one layer; the first dimension counts pages, the rest is the kernels' affair."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """What attention needs beside q, k and v; fp32."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    cos: torch.Tensor  # [context, head_dim / 2]
    sin: torch.Tensor  # the same
    q_norm: torch.Tensor  # [head_dim], or [0]: none
    k_norm: torch.Tensor  # the same


class Kernels(Protocol):
    """One set of operations for one device and dtype."""

    device: torch.device
    dtype: torch.dtype
    groups: bool  # the products of all experts of a layer are faster together

    def step(self) -> AbstractContextManager[None]:
        """Around the operations of one step: what makes them fast is at hand inside."""

    def close(self) -> None:
        """End what was started."""

    def linear(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Linear:
        """A linear layer whose weight is the parts [n_i, k], one after the other."""

    def head(self, weight: torch.Tensor) -> Linear:
        """The output layer; its results may be wider than the dtype."""

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> Gated:
        """The first half of a SwiGLU MLP."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (Zhang, Sennrich 2019) of each row."""

    def new_cache(self, pages: int, page_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        """Storage for one layer."""

    def prepare(self, batch: Batch, heads_per_kv_head: int) -> Any:
        """What `attention` needs of a batch, made once a step."""

    def attention(
        self, qkv: torch.Tensor, cache: LayerCache, prepared: Any, w: AttentionWeights
    ) -> torch.Tensor:
        """Norm and rotate q and k, write k and v into their pages, attend over the block tables.

        qkv [tokens, (heads + 2 kv_heads) * head_dim] is overwritten; returns [tokens, heads * head_dim].
        """

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The lowest id among the largest logits of each row, int64 [rows]."""

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: NDArray[np.float32],
        keys: NDArray[np.uint64],
        filters: Filters,
    ) -> torch.Tensor:
        """One token a row, int64 [rows]; see `drawing.draw`."""


@dataclass(frozen=True, slots=True)
class _CpuBatch:
    batch: Batch
    item_rows: int
    items: NDArray[np.int32]  # [4, items]: rows, first tokens, positions and counts of attention's items


class CpuKernels:
    """fp32 on CPU through numba: every row's result is bitwise independent of its batch."""

    device = torch.device("cpu")
    dtype = torch.float32
    groups = False

    def __init__(self, threads: int) -> None:
        self.pool = Pool(threads)

    def step(self) -> AbstractContextManager[None]:
        """See `Kernels`."""
        return self.pool.step()

    def close(self) -> None:
        """See `Kernels`."""
        self.pool.close()

    def linear(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Linear:
        """See `Kernels`."""
        return PackedLinear(parts, bias, self.pool)

    def head(self, weight: torch.Tensor) -> Linear:
        """See `Kernels`."""
        return self.linear([weight])

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> Gated:
        """See `Kernels`."""
        return PackedGated(gate, up, self.pool)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Kernels`."""
        out = torch.empty_like(x)
        cpu_norm.rms_norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def new_cache(self, pages: int, page_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        """See `Kernels`."""
        tiles, dim_tiles = -(-page_size // LANES), -(-head_dim // LANES)
        return LayerCache(
            torch.zeros(pages, kv_heads, tiles, head_dim, LANES),
            torch.zeros(pages, kv_heads, dim_tiles, page_size, LANES),
        )

    def prepare(self, batch: Batch, heads_per_kv_head: int) -> _CpuBatch:
        """See `Kernels`."""
        most = max(cpu_attention.ITEM_ROWS // heads_per_kv_head, 1)
        ends = np.cumsum(batch.counts)
        rows, tokens, positions, counts = [], [], [], []
        for row, (start, count, end) in enumerate(zip(batch.starts, batch.counts, ends, strict=True)):
            for first in range(0, count, most):
                rows.append(row)
                tokens.append(end - count + first)
                positions.append(start + first)
                counts.append(min(most, count - first))
        return _CpuBatch(
            batch, most * heads_per_kv_head, np.array([rows, tokens, positions, counts], np.int32)
        )

    def attention(
        self, qkv: torch.Tensor, cache: LayerCache, prepared: _CpuBatch, w: AttentionWeights
    ) -> torch.Tensor:
        """See `Kernels`."""
        batch, k, v = prepared.batch, cache.k.numpy(), cache.v.numpy()
        out = torch.empty(qkv.shape[0], w.heads * w.head_dim)
        q = qkv.numpy()
        cpu_attention.rotate_and_store(
            q, batch.positions.numpy(), batch.pages.numpy(), batch.slots.numpy(), w.cos.numpy(),
            w.sin.numpy(), w.q_norm.numpy(), w.k_norm.numpy(), np.float32(w.eps), k, v,
        )  # fmt: skip
        kv_heads, page_size = v.shape[1], v.shape[3]
        tokens, items = qkv.shape[0], prepared.items.shape[1]
        self.pool.run(
            cpu_jobs.ATTEND, items * kv_heads, qkv.data_ptr(), cache.k.data_ptr(), cache.v.data_ptr(),
            batch.tables.data_ptr(), prepared.items.ctypes.data, out.data_ptr(), tokens,
            batch.tables.shape[1], items, k.shape[0], kv_heads, w.heads // kv_heads, w.head_dim, page_size,
            prepared.item_rows,
        )  # fmt: skip
        return out

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64)
        self.pool.run(cpu_jobs.ARGMAX, len(tokens), logits.data_ptr(), tokens.data_ptr(), logits.shape[1])
        return tokens

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: NDArray[np.float32],
        keys: NDArray[np.uint64],
        filters: Filters,
    ) -> torch.Tensor:
        """See `Kernels`."""
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64)
        arrays = (temperatures, keys, filters.top_k, filters.top_p, filters.min_p, filters.totals)
        self.pool.run(
            cpu_jobs.DRAW, len(tokens), logits.data_ptr(), *[array.ctypes.data for array in arrays],
            tokens.data_ptr(), len(tokens), logits.shape[1],
        )  # fmt: skip
        return tokens


class CpuInt8Kernels(CpuKernels):
    """The same with int8 weights: fp32 between the products, sums of integers in them."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._scratch = Scratch()

    def linear(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Linear:
        """See `Kernels`."""
        return Int8Linear(parts, bias, self.pool, self._scratch)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> Gated:
        """See `Kernels`."""
        return Int8Gated(gate, up, self.pool, self._scratch)


class PlainLinear:
    """x W^T + b through F.linear."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        out = functional.linear(x, self.weight, self._bias)
        return out if add_to is None else add_to.add_(out)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return self.weight[ids]

    def bytes(self) -> int:
        """See `Linear`."""
        return self.weight.nbytes


class PlainGated:
    """silu(x G^T) * (x U^T) through F.linear."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight  # gate above up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(x, self._weight).chunk(2, dim=-1)
        return functional.silu(gate) * up

    def bytes(self) -> int:
        """See `Linear`."""
        return self._weight.nbytes


class PlainKernels:
    """Any device and dtype in plain torch: attention gathers each row's pages. Correct, not fast."""

    groups = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def step(self) -> AbstractContextManager[None]:
        """See `Kernels`."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to end."""

    def linear(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Linear:
        """See `Kernels`."""
        return PlainLinear(self._put(torch.cat(list(parts))), None if bias is None else self._put(bias))

    def head(self, weight: torch.Tensor) -> Linear:
        """See `Kernels`."""
        return self.linear([weight])

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> Gated:
        """See `Kernels`."""
        return PlainGated(self._put(torch.cat([gate, up])))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Kernels`."""
        wide = x.float()
        return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)

    def new_cache(self, pages: int, page_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        """See `Kernels`."""
        shape = (pages, page_size, kv_heads, head_dim)
        return LayerCache(
            torch.zeros(shape, dtype=self.dtype, device=self.device),
            torch.zeros(shape, dtype=self.dtype, device=self.device),
        )

    def prepare(self, batch: Batch, heads_per_kv_head: int) -> Batch:
        """See `Kernels`."""
        return batch

    def attention(
        self, qkv: torch.Tensor, cache: LayerCache, prepared: Batch, w: AttentionWeights
    ) -> torch.Tensor:
        """See `Kernels`."""
        heads = qkv.view(qkv.shape[0], -1, w.head_dim)
        q, k, v = torch.split(heads, [w.heads, w.kv_heads, w.kv_heads], dim=1)
        cos, sin = w.cos[prepared.positions], w.sin[prepared.positions]
        q, k = self._rotate(q, cos, sin, w.q_norm, w.eps), self._rotate(k, cos, sin, w.k_norm, w.eps)
        cache.k[prepared.pages, prepared.slots] = k
        cache.v[prepared.pages, prepared.slots] = v
        outs, first = [], 0
        for table, start, count in zip(prepared.tables, prepared.starts, prepared.counts, strict=True):
            length = int(start + count)
            keys = cache.k[table].flatten(0, 1)[:length].transpose(0, 1)
            values = cache.v[table].flatten(0, 1)[:length].transpose(0, 1)
            rows = torch.arange(int(start), length, device=self.device)
            visible = rows[:, None] >= torch.arange(length, device=self.device)[None, :]
            queries = q[first : first + count].transpose(0, 1)
            out = functional.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=visible, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1).flatten(1))
            first += count
        return torch.cat(outs)

    def _rotate(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Kernels`."""
        if len(norm):
            x = self.rms_norm(x, norm, eps)
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(self.dtype)

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        return tensor.to(device=self.device, dtype=self.dtype)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        return logits.argmax(-1)

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: NDArray[np.float32],
        keys: NDArray[np.uint64],
        filters: Filters,
    ) -> torch.Tensor:
        """See `Kernels`."""
        return draw(logits, temperatures, keys, filters)
