"""`CudaKernels`: bf16, fp16 or fp32 on CUDA; matrix products of many rows in torch, all else in Triton.

Linear layers are in `linear/linears.py`, those with int8 or fp8 weights in `linear/quantized.py`,
those with weights of 4 bits in `linear/packed_linear.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.cuda.attention.attention import (
    MAX_HEAD_DIM,
    new_arrivals,
    paged_attention,
)
from executor_service.backends.torch_backend.cuda.attention.rotary import rotary_launch
from executor_service.backends.torch_backend.cuda.layout.rows import (
    AttentionRows,
    Tiling,
    attention_rows,
    cut,
)
from executor_service.backends.torch_backend.cuda.linear import pointwise as triton_pointwise
from executor_service.backends.torch_backend.cuda.linear import routing as triton_routing
from executor_service.backends.torch_backend.cuda.linear.device_adapters import CudaLowRank
from executor_service.backends.torch_backend.cuda.linear.experts import sum_experts
from executor_service.backends.torch_backend.cuda.linear.linears import (
    CudaLinear,
    NarrowGated,
    NarrowLinear,
    WideLinear,
)
from executor_service.backends.torch_backend.cuda.linear.packed_linear import (
    PackedLinear,
    alike,
    is_supported,
)
from executor_service.backends.torch_backend.cuda.linear.quantized import fused
from executor_service.backends.torch_backend.cuda.linear.rank_sums import sum_parts
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import (
    new_arrivals as new_product_arrivals,
)
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight, plain
from executor_service.backends.torch_backend.ops.kernels import (
    AttentionShape,
    AttentionWeights,
    GatedLinear,
    Linear,
    PlainKernels,
)
from executor_service.backends.torch_backend.ops.page_format import LayerCache
from executor_service.backends.torch_backend.ops.quantized import Format
from executor_service.backends.torch_backend.ops.row_tensors import Batch


@dataclass(frozen=True, slots=True)
class CudaStep:
    """What attention needs to know of a step: int32 [tokens] on the device, and the rows."""

    positions: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor
    rows: Mapping[int, AttentionRows]  # by the layer's window


class CudaKernels(PlainKernels):
    """`Kernels` whose attention reads the pages in place: a row's attention is independent of its batch."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        form: Format | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(device, dtype, None if form is None else fused(form), cache_dtype)
        self.low_rank = CudaLowRank(device, dtype)
        self.sum_experts = sum_experts
        self._product_arrivals = new_product_arrivals(device)
        self._arrivals: dict[int, torch.Tensor] = {}  # by the number of KV heads

    def linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> Linear:
        if self.form is not None:
            return super().linear(parts, bias)
        weight = self._put(torch.cat([plain(part) for part in parts]))
        bias = None if bias is None else self._put(bias)
        if self.dtype == torch.float32:
            return CudaLinear(weight, bias)
        return NarrowLinear(weight, bias, self._product_arrivals)

    def gate(self, both: Linear, activation: Activation) -> GatedLinear:
        if isinstance(both, NarrowLinear | PackedLinear):
            return NarrowGated(both, activation)
        return super().gate(both, activation)

    def join(self, both: torch.Tensor, activation: Activation) -> torch.Tensor:
        return triton_pointwise.gated(both, activation)

    def route(
        self, logits: torch.Tensor, count: int, *, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return triton_routing.route(logits, count, renormalize=renormalize)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        return triton_pointwise.rms_norm(x, weight, eps, add_to)

    def sum_parts(self, parts: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        return sum_parts(parts, add_to)

    def head(self, weight: Weight) -> Linear:
        if self.device.type != "cuda" or self.dtype == torch.float32:  # interpreted; fp32 already
            return super().head(weight)
        return WideLinear(self._put(plain(weight)), self._product_arrivals)

    def new_cache(self, pages: int, page_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        """As `Kernels.new_cache`. Raises ModelError if head_dim is odd or too large."""
        if head_dim > MAX_HEAD_DIM or head_dim % 2:
            raise ModelError(f"head_dim {head_dim} is odd or above {MAX_HEAD_DIM}: not supported on CUDA")
        if kv_heads not in self._arrivals:
            self._arrivals[kv_heads] = new_arrivals(kv_heads, self.device)
        return super().new_cache(pages, page_size, kv_heads, head_dim)

    def prepare(self, batch: Batch, shape: AttentionShape) -> CudaStep:
        tiling = Tiling.of(shape.heads_per_kv_head, self.dtype, shape.head_dim, shape.windows, shape.kv_heads)
        width = batch.tables.shape[1]
        table_starts = np.arange(len(batch.counts), dtype=np.int32) * np.int32(width)
        arrays = cut(batch.starts, batch.counts, table_starts, tiling)
        parts = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        rows = attention_rows(batch.tables.flatten(), parts, tiling)
        return CudaStep(batch.positions, batch.pages, batch.slots, rows)

    def attention(
        self, qkv: torch.Tensor, cache: LayerCache, prepared: CudaStep, w: AttentionWeights
    ) -> torch.Tensor:
        rotary_launch(qkv, cache, prepared.positions, prepared.pages, prepared.slots, w).run()
        q = qkv.view(qkv.shape[0], -1, w.head_dim)[:, : w.heads]
        rows, arrivals = prepared.rows[w.window], self._arrivals[w.kv_heads]
        return paged_attention(q, cache, rows, arrivals, w.scale, w.score_cap, w.sinks)


class CudaBlockKernels(CudaKernels):
    """`CudaKernels` that multiply weights of 4 bits in groups as they are, by activations in bf16.

    A layer of which some part is not so is computed in bf16, from dequantized weights.
    """

    def keeps(self, weight: ScaledNumbers) -> bool:
        """Numbers of 16 levels, in groups of a multiple of 32 or by row."""
        return is_supported(weight)

    def linear(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> Linear:
        scaled = alike(parts)
        if scaled is None:
            return super().linear(parts, bias)
        return PackedLinear(scaled, bias, self._product_arrivals)
