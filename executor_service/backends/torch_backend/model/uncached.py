"""Forwards over whole inputs with temporary KV pages, which no sequence owns.

They serve the Forward RPC, compile kernels at the start, and find out how much memory a step takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from executor_service.backends.base import ForwardOutput, ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.model.model import Model
from executor_service.backends.torch_backend.model.shard import Shard
from executor_service.backends.torch_backend.model.viewed_attention import ViewedAttention
from executor_service.backends.torch_backend.ops import sampler
from executor_service.backends.torch_backend.ops.row_tensors import LOGITS_ROWS, Batch
from executor_service.contract.forward_view import WHOLE, ForwardView
from executor_service.contract.plan import OutputMode, Sampling, TokenIds

PAGE_SIZE = 16
"""Tokens of a page where no other size is given."""


def forward_uncached(
    model: Model,
    shard: Shard,
    tokens: TokenIds,
    want: frozenset[str],
    page_size: int = PAGE_SIZE,
    view: ForwardView = WHOLE,
) -> ForwardOutput:
    """What is wanted of "hidden", "embedding" and "logits" of one input, int32 [tokens].

    The embedding is the mean of the final hidden states, scaled to length 1. Attention may add up in another
    order with another `page_size`: with the cache's own, the results are those of steps over the cache, to
    the last bit where a row does not depend on its batch.
    """
    hidden = _hidden(model, [tokens], page_size, view)
    vectors, part = model.vectors(hidden), hidden[view.returned]
    mean = vectors.mean(0)
    return ForwardOutput(
        hidden=vectors[view.returned].cpu().numpy() if "hidden" in want else None,
        embedding=(mean / mean.norm().clamp_min(1e-12)).cpu().numpy() if "embedding" in want else None,
        logits=shard.whole_logits(model.logits(part)).cpu().numpy() if "logits" in want else None,
    )


def compile_kernels(model: Model, shard: Shard, context_length: int) -> None:
    """Compile what the first step needs: numba caches it on disk, so only the first start is slow."""
    kernels = model.kernels
    with torch.inference_mode(), kernels.step():
        tokens = np.zeros(8, np.int32)
        logits = forward_uncached(model, shard, tokens, frozenset({"logits"})).logits
        if kernels.device.type == "cuda":  # long rows, and products of few rows, use other kernels
            forward_uncached(model, shard, np.zeros(min(32, context_length), np.int32), frozenset())
            forward_uncached(model, shard, tokens[:1], frozenset({"logits"}))
        for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)):
            sampler.sample(torch.from_numpy(logits), [_prompt_row(tokens, 1, 2, sampling)], kernels)


def step_bytes(model: Model, context_length: int, rows: int, tokens: int) -> int:
    """Peak bytes on CUDA, beyond weights and KV pages, of prompts of `tokens` in all and logits of `rows`."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    longest = min(tokens, context_length)
    lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
    with torch.inference_mode():
        hidden = _hidden(model, [np.zeros(length, np.int32) for length in lengths], PAGE_SIZE)
        model.shared_logits(hidden[: min(rows, LOGITS_ROWS)])
    return torch.cuda.max_memory_allocated() - before


def _hidden(
    model: Model, prompts: Sequence[TokenIds], page_size: int, view: ForwardView = WHOLE
) -> torch.Tensor:
    """Final hidden states of all prompts' tokens, [tokens, hidden]; of a single one with a `view`."""
    spec = model.spec
    rows, pages = [], 1
    for tokens in prompts:
        count = -(-len(tokens) // page_size)
        rows.append(_prompt_row(tokens, pages, pages + count, Sampling()))
        pages += count
    # All layers share one layer's storage: a layer reads only the keys and values that it has just written.
    batch = Batch.of(ForwardRows(rows), page_size, model.kernels.device)
    attend = None if view.is_plain else ViewedAttention(model.kernels, view)
    scratch = (attend or model.kernels).new_cache(pages, page_size, spec.kv_heads, spec.head_dim)
    prepared = model.prepare(batch) if attend is None else batch
    return model.hidden(batch.tokens, batch.states, prepared, [scratch] * spec.layers, attend=attend)


def _prompt_row(tokens: TokenIds, first_page: int, end_page: int, sampling: Sampling) -> ForwardRow:
    return ForwardRow(
        start=0,
        tokens=tokens,
        history=tokens,
        prompt_length=len(tokens),
        block_table=np.arange(first_page, end_page, dtype=np.int32),
        outputs=len(tokens),
        output=OutputMode.SAMPLE,
        sampling=sampling,
    )
