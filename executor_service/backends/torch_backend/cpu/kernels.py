"""`CpuKernels`: the operations of a model on CPU through numba, in fp32 or with int8 weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from executor_service.backends.torch_backend.batch import Batch
from executor_service.backends.torch_backend.cpu.attention import attend as cpu_attention
from executor_service.backends.torch_backend.cpu.attention.pages import NARROWEST
from executor_service.backends.torch_backend.cpu.layers.linear_fp32 import PackedGated, PackedLinear
from executor_service.backends.torch_backend.cpu.layers.linear_int8 import Int8Gated, Int8Linear, Scratch
from executor_service.backends.torch_backend.cpu.layers.stack import (
    CpuBatch,
    attention_jobs,
    cached,
    norm_job,
    stacked,
)
from executor_service.backends.torch_backend.cpu.primitives.registers import LANES
from executor_service.backends.torch_backend.cpu.threads import jobs as cpu_jobs
from executor_service.backends.torch_backend.cpu.threads.thread_pool import Pool
from executor_service.backends.torch_backend.drawing import Filters
from executor_service.backends.torch_backend.kernels import (
    AttentionWeights,
    Block,
    Gated,
    LayerCache,
    Linear,
    Stack,
)


class CpuKernels:
    """fp32 on CPU through numba: every row's result is bitwise independent of its batch."""

    device = torch.device("cpu")
    dtype = cache_dtype = torch.float32
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
        self.pool.run(norm_job(len(x), x.data_ptr(), weight, out.data_ptr(), eps))
        return out

    def new_cache(self, pages: int, page_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        """See `Kernels`."""
        tiles, dim_tiles = -(-page_size // LANES), -(-head_dim // LANES)
        return LayerCache(
            torch.zeros(pages, kv_heads, tiles, head_dim, LANES, dtype=self.cache_dtype),
            torch.zeros(pages, kv_heads, dim_tiles, page_size, LANES, dtype=self.cache_dtype),
        )

    def prepare(self, batch: Batch, heads_per_kv_head: int) -> CpuBatch:
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
        table = np.array([rows, tokens, positions, counts], np.int32)
        described = np.array(
            [
                batch.positions.data_ptr(), batch.pages.data_ptr(), batch.slots.data_ptr(),
                batch.tables.data_ptr(), batch.tables.shape[1], table.ctypes.data, len(rows),
                most * heads_per_kv_head,
            ],
            np.int64,
        )  # fmt: skip
        return CpuBatch(described.ctypes.data, len(rows), (batch, table, described))

    def attention(
        self, qkv: torch.Tensor, cache: LayerCache, prepared: CpuBatch, w: AttentionWeights
    ) -> torch.Tensor:
        """See `Kernels`."""
        out = torch.empty(qkv.shape[0], w.heads * w.head_dim)
        on = cached(prepared, cache)
        self.pool.run(*attention_jobs(len(qkv), prepared.items, on, qkv.data_ptr(), out.data_ptr(), w))
        return out

    def stack(self, blocks: Sequence[Block], eps: float) -> Stack | None:
        """See `Kernels`."""
        return stacked(self.pool, blocks, eps)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Kernels`."""
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64)
        self.pool.run((cpu_jobs.ARGMAX, len(tokens), logits.data_ptr(), tokens.data_ptr(), logits.shape[1]))
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
        addresses = (logits.data_ptr(), *[array.ctypes.data for array in arrays], tokens.data_ptr())
        self.pool.run((cpu_jobs.DRAW, len(tokens), *addresses, len(tokens), logits.shape[1]))
        return tokens


class CpuInt8Kernels(CpuKernels):
    """The same with int8 weights: fp32 between the products, sums of integers in them; pages hold fp16."""

    cache_dtype = NARROWEST

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._scratch = Scratch()

    def linear(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Linear:
        """See `Kernels`."""
        return Int8Linear(parts, bias, self.pool, self._scratch)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> Gated:
        """See `Kernels`."""
        return Int8Gated(gate, up, self.pool, self._scratch)
