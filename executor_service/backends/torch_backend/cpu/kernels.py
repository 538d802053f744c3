"""`CpuKernels`: the operations of a model on CPU through numba: fp32, or over weights in int8 or blocks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from service_kit.logs import Log

from executor_service.backends.torch_backend.cpu.attention.batch import PreparedBatch, prepare_batch
from executor_service.backends.torch_backend.cpu.attention.pages import NARROWEST, Pages, new_layer_cache
from executor_service.backends.torch_backend.cpu.layers import linear_blocks
from executor_service.backends.torch_backend.cpu.layers.linear_blocks import BlockGated, BlockLinear
from executor_service.backends.torch_backend.cpu.layers.linear_fp32 import PackedGated, PackedLinear
from executor_service.backends.torch_backend.cpu.layers.linear_int8 import Int8Gated, Int8Linear
from executor_service.backends.torch_backend.cpu.layers.linear_scaled import (
    ScaledGated,
    ScaledLinear,
    alike,
    is_supported,
)
from executor_service.backends.torch_backend.cpu.layers.recorded_blocks import (
    attention_calls,
    norm_call,
    record_blocks,
)
from executor_service.backends.torch_backend.cpu.layers.step_changes import CpuLowRank
from executor_service.backends.torch_backend.cpu.layers.threaded_linear import Scratch
from executor_service.backends.torch_backend.cpu.primitives.records import address_of
from executor_service.backends.torch_backend.cpu.rowwise.log_sum import LogSumRows
from executor_service.backends.torch_backend.cpu.rowwise.sampling import (
    DrawTokens,
    ExcludeTokens,
    TakeLargest,
)
from executor_service.backends.torch_backend.cpu.threads.thread_pool import ThreadPool
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight, plain
from executor_service.backends.torch_backend.ops.drawing import Filters
from executor_service.backends.torch_backend.ops.kernels import (
    AttentionShape,
    AttentionWeights,
    Block,
    GatedLinear,
    Linear,
    PlainGated,
    RecordedBlocks,
    join,
)
from executor_service.backends.torch_backend.ops.page_format import LayerCache
from executor_service.backends.torch_backend.ops.rank_sums import sum_in_order
from executor_service.backends.torch_backend.ops.row_tensors import Batch
from executor_service.backends.torch_backend.ops.stacked_experts import SumExperts, route
from executor_service.contract.masks import Masks

log = Log(__name__)


class CpuKernels:
    """fp32 on CPU through numba: every row's result is bitwise independent of its batch.

    Weights in bf16 and fp16 stay as they are, which changes no bit of a result.
    """

    device = torch.device("cpu")
    dtype = torch.float32
    sum_experts: SumExperts | None = None
    adapter_dtype = torch.float32
    wide_cache_dtype = torch.float32  # of pages without scales

    def __init__(self, threads: int, cache_dtype: torch.dtype | None = None) -> None:
        """`cache_dtype`: torch.int8; None: `wide_cache_dtype`."""
        self.cache_dtype = cache_dtype or self.wide_cache_dtype
        self.pool = ThreadPool(threads)
        self.low_rank = CpuLowRank(self.adapter_dtype)

    def step(self) -> AbstractContextManager[None]:
        """Keep the helper threads awake for the operations inside."""
        return self.pool.step()

    def close(self) -> None:
        """End the helper threads."""
        self.pool.close()

    def keeps(self, weight: ScaledNumbers) -> bool:
        """Numbers of 8 bits, in groups that follow each other."""
        return is_supported(weight)

    def linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> Linear:
        """x W^T + b, with W in its own dtype, packed once."""
        scaled = alike(parts)
        if scaled is None:
            return PackedLinear([plain(part) for part in parts], bias, self.pool)
        return ScaledLinear(scaled, bias, self.pool)

    def head(self, weight: Weight) -> Linear:
        """The output layer, in the precision of the other linear layers."""
        return self.linear([weight])

    def gated(
        self,
        gate: Weight,
        up: Weight,
        activation: Activation = Activation.SILU,
        bias: torch.Tensor | None = None,
    ) -> GatedLinear:
        """activation(x G^T) * (x U^T), with G and U packed once."""
        if bias is not None:  # few models have one: no kernel of its own
            return PlainGated(self.linear([gate, up], bias), join, activation)
        return self._gated(gate, up, activation)

    def _gated(self, gate: Weight, up: Weight, activation: Activation) -> GatedLinear:
        """The gated layer of weights in their own dtype."""
        scaled = alike((gate, up))
        if scaled is None:
            return PackedGated(plain(gate), plain(up), activation, self.pool)
        return ScaledGated(scaled[0], scaled[1], activation, self.pool)

    def route(
        self, logits: torch.Tensor, count: int, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, in plain torch."""
        return route(logits, count, renormalize=renormalize)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """RMSNorm of each row of x [rows, n], fp32, with contiguous columns; with `add_to`, added to it."""
        out = torch.empty(x.shape) if add_to is None else add_to
        add, at = add_to is not None, (address_of(x), address_of(out))
        self.pool.run(norm_call(len(x), *at, weight, eps, add=add, strides=(x.stride(0), out.stride(0))))
        return out

    def sum_parts(self, parts: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        return sum_in_order(parts, add_to)

    def new_cache(self, pages: int, page_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        """Pages of zeros, in the layout of `attention.pages`."""
        return new_layer_cache(pages, page_size, kv_heads, head_dim, self.cache_dtype)

    def prepare(self, batch: Batch, shape: AttentionShape) -> PreparedBatch:
        """Cut the batch into the items of `attention.attend`."""
        return prepare_batch(batch, shape.heads_per_kv_head)

    def attention(
        self, qkv: torch.Tensor, cache: LayerCache, prepared: PreparedBatch, w: AttentionWeights
    ) -> torch.Tensor:
        """Rotate q and k, write k and v, attend: two calls."""
        out = torch.empty(qkv.shape[0], w.heads * w.head_dim)
        at, pages = (address_of(qkv), address_of(out)), Pages.of(cache)
        self.pool.run(*attention_calls(len(qkv), prepared.places, prepared.items, pages, *at, w))
        return out

    def record(self, blocks: Sequence[Block], eps: float) -> RecordedBlocks | None:
        """All calls of the blocks in one table; None if some of their products are not CPU kernels."""
        return record_blocks(self.pool, blocks, eps, self.low_rank)

    def exclude(self, logits: torch.Tensor, places: NDArray[np.int64], masks: Masks) -> None:
        """Set logits[places] to -inf where the masks do not allow the token."""
        count, width = masks.shape
        called = address_of(logits), address_of(places), address_of(masks)
        self.pool.run(ExcludeTokens(count, logits.shape[1], *called, width // 4))

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The first of the largest logits of each row: int64 [rows]."""
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64)
        rows, vocabulary = logits.shape
        self.pool.run(TakeLargest(rows, vocabulary, address_of(logits), address_of(tokens)))
        return tokens

    def log_sum_exp(self, logits: torch.Tensor) -> torch.Tensor:
        """Log of the sum of exponentials of each row of logits [rows, vocabulary]: fp32 [rows]."""
        rows, vocabulary = logits.shape
        sums = torch.empty(rows)
        self.pool.run(LogSumRows(rows, vocabulary, address_of(logits), address_of(sums)))
        return sums

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: NDArray[np.float32],
        keys: NDArray[np.uint64],
        filters: Filters,
    ) -> torch.Tensor:
        """A token for each row, int64 [rows], as `drawing.draw` draws it."""
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64)
        rows, vocabulary = logits.shape
        call = DrawTokens(
            rows=rows,
            vocabulary=vocabulary,
            logits=address_of(logits),
            temperatures=address_of(temperatures),
            keys=address_of(keys),
            top_k=address_of(filters.top_k),
            top_p=address_of(filters.top_p),
            min_p=address_of(filters.min_p),
            totals=address_of(filters.totals),
            tokens=address_of(tokens),
        )
        self.pool.run(call)
        return tokens


class CpuInt8Kernels(CpuKernels):
    """`CpuKernels` with int8 weights: products sum integers, pages and adapters have fp16, all else fp32."""

    wide_cache_dtype = NARROWEST
    adapter_dtype = torch.float16

    def __init__(self, threads: int, cache_dtype: torch.dtype | None = None) -> None:
        super().__init__(threads, cache_dtype)
        self._scratch = Scratch()

    def keeps(self, weight: ScaledNumbers) -> bool:
        """int8 with a scale for each row."""
        return weight.by_row and weight.numbers.dtype == torch.int8

    def linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> Linear:
        """x W^T + b, with W in int8, packed once."""
        return Int8Linear(parts, bias, self.pool, self._scratch)

    def _gated(self, gate: Weight, up: Weight, activation: Activation) -> GatedLinear:
        return Int8Gated(gate, up, activation, self.pool, self._scratch)


class CpuBlockKernels(CpuKernels):
    """`CpuKernels` that multiply blocks of quantized weights as they are, by activations in blocks of int8.

    A layer of which no part is in blocks is computed in fp32, as `CpuKernels` does. Pages have fp16.
    """

    wide_cache_dtype = NARROWEST

    def __init__(self, threads: int, cache_dtype: torch.dtype | None = None) -> None:
        super().__init__(threads, cache_dtype)
        self._scratch = Scratch()

    def keeps(self, weight: ScaledNumbers) -> bool:
        """int8 in groups of 16, or of a multiple of 32."""
        return linear_blocks.is_supported(weight)

    def linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> Linear:
        """x W^T + b, with W in blocks, packed once."""
        blocks = _in_blocks(parts)
        if blocks is None:
            return super().linear(list(map(plain, parts)), bias)
        return BlockLinear(blocks, bias, self.pool, self._scratch)

    def _gated(self, gate: Weight, up: Weight, activation: Activation) -> GatedLinear:
        blocks = _in_blocks((gate, up))
        if blocks is None:
            return super()._gated(plain(gate), plain(up), activation)
        return BlockGated(blocks[0], blocks[1], activation, self.pool, self._scratch)


def _in_blocks(parts: Sequence[Weight]) -> list[ScaledNumbers] | None:
    """The parts of a layer, if all are in blocks; None, with a word if some are."""
    blocks = [part for part in parts if isinstance(part, ScaledNumbers)]
    if len(blocks) == len(parts):
        return blocks
    if blocks:
        log.warning(
            "a layer's parts are partly quantized: all are dequantized",
            quantized=len(blocks),
            parts=len(parts),
        )
    return None
