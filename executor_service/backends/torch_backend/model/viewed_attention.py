"""`ViewedAttention`: attention of one input with positions or a mask of its own, in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from executor_service.backends.torch_backend.ops.kernels import (
    AttentionWeights,
    Kernels,
    PlainKernels,
    attend,
)
from executor_service.backends.torch_backend.ops.page_format import LayerCache, get, put
from executor_service.backends.torch_backend.ops.row_tensors import Batch
from executor_service.contract.forward_view import BLOCK, ForwardView


class ViewedAttention:
    """As the attention of `kernels`, whose other operations are used: for a batch of one row from position 0.

    Keys and values are rounded as the kernels round those in their pages.
    """

    def __init__(self, kernels: Kernels, view: ForwardView) -> None:
        self._plain = PlainKernels(kernels.device, kernels.dtype, cache_dtype=kernels.cache_dtype)
        self._view = view

    def new_cache(self, pages: int, page_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        """Pages that this attention reads."""
        return self._plain.new_cache(pages, page_size, kv_heads, head_dim)

    def __call__(self, qkv: torch.Tensor, cache: LayerCache, batch: Any, w: AttentionWeights) -> torch.Tensor:
        """qkv [tokens, (heads + 2 kv_heads) * head_dim] to [tokens, heads * head_dim]."""
        assert isinstance(batch, Batch)
        q, k, v = self._plain.rotated(qkv, self._positions(batch), w)
        put(cache, (batch.pages, batch.slots), k, v)
        keys, values = (x[: len(q)].transpose(0, 1) for x in get(cache, batch.tables[0], self._plain.dtype))
        outs = []
        for begin in range(0, len(q), BLOCK):
            end = min(begin + BLOCK, len(q))
            seen = torch.from_numpy(self._view.seen(begin, end, w.window)).to(qkv.device)
            queries = q[begin:end].transpose(0, 1)
            outs.append(attend(queries, keys[:, :end], values[:, :end], seen, w))
        return torch.cat(outs)

    def _positions(self, batch: Batch) -> torch.Tensor:
        given = self._view.positions
        return batch.positions if given is None else torch.from_numpy(given).to(batch.positions.device)
