"""Prints a digest of what each kind of kernel makes of fixed inputs, then whether machine code was compiled.

A program, since a process loads the kernels once: `python -m tests.unit.executor.kernel_results`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cpu.kernels import CpuInt8Kernels, CpuKernels
from executor_service.backends.torch_backend.cpu.threads.work import work
from executor_service.backends.torch_backend.ops.drawing import Filters
from executor_service.backends.torch_backend.ops.kernels import AttentionShape, AttentionWeights
from executor_service.backends.torch_backend.ops.low_rank import (
    AdaptedRows,
    AdapterShape,
    LinearPart,
    PartFactors,
)
from executor_service.backends.torch_backend.ops.row_tensors import Batch
from executor_service.contract.plan import OutputMode, Sampling

_HEADS, _KV_HEADS, _DIM, _PAGE_SIZE = 6, 2, 32, 16
_VOCABULARY = 999


def _products(kernels: CpuKernels) -> Iterator[tuple[str, torch.Tensor]]:
    weight, up, bias, x = torch.randn(72, 50), torch.randn(72, 50), torch.randn(72), torch.randn(30, 50)
    for rows in (1, 5, 30):
        yield f"linear of {rows} rows", kernels.linear([weight], bias)(x[:rows])
        yield f"gated of {rows} rows", kernels.gated(weight, up)(x[:rows])
    yield "norm", kernels.rms_norm(x, torch.rand(50), 1e-5)


def _adapted(kernels: CpuKernels) -> Iterator[tuple[str, torch.Tensor]]:
    parts = [LinearPart(0, name, 50, 36, first) for name, first in (("q_proj", 0), ("k_proj", 36))]
    parts += [LinearPart(0, name, 50, 72, first) for name, first in (("gate_proj", 0), ("up_proj", 72))]
    factors = [PartFactors(part, torch.randn(5, 50), torch.randn(part.outputs, 5)) for part in parts]
    adapter = kernels.low_rank.pack(AdapterShape(1, 5, parts), 0.3, factors)
    changes = kernels.low_rank.step([AdaptedRows(adapter, 2, 17)], 30).of_layer(0)
    weight, up, x = torch.randn(72, 50), torch.randn(72, 50), torch.randn(30, 50)
    yield "linear with an adapter", kernels.linear([weight])(x, change=changes.qkv)
    yield "gated with an adapter", kernels.gated(weight, up)(x, change=changes.gated)


def _attention(kernels: CpuKernels, normed: bool) -> Iterator[tuple[str, torch.Tensor]]:
    angles = torch.arange(100)[:, None] * torch.rand(_DIM // 2)[None, :]
    norm = torch.rand(_DIM) + 0.5 if normed else torch.empty(0)
    rotary, scale = (angles.cos(), angles.sin()), _DIM**-0.5
    weights = AttentionWeights(_HEADS, _KV_HEADS, _DIM, 1e-6, *rotary, norm, norm, scale, window=40)
    cache = kernels.new_cache(10, _PAGE_SIZE, _KV_HEADS, _DIM)
    table = np.arange(1, 6, dtype=np.int32)
    for start, count in ((0, 70), (70, 1), (71, 9)):
        tokens, history = np.zeros(count, np.int32), np.zeros(start + count, np.int32)
        row = ForwardRow(start, tokens, history, 0, table, 1, OutputMode.SAMPLE, Sampling())
        batch = Batch.of(ForwardRows([row]), _PAGE_SIZE, kernels.device)
        prepared = kernels.prepare(batch, AttentionShape(_HEADS // _KV_HEADS, _DIM))
        qkv = torch.randn(count, (_HEADS + 2 * _KV_HEADS) * _DIM)
        yield f"attention, normed={normed}, {start}", kernels.attention(qkv, cache, prepared, weights)
    yield f"keys, normed={normed}", cache.k
    yield f"values, normed={normed}", cache.v
    yield f"scales, normed={normed}", cache.scales.view(torch.int16)


def _tokens(kernels: CpuKernels) -> Iterator[tuple[str, torch.Tensor]]:
    rows = 8
    logits = torch.randn(rows, _VOCABULARY) * 3
    temperatures, keys = np.full(rows, 0.8, np.float32), np.arange(rows, dtype=np.uint64) * 12_345_678_901
    yield "the largest", kernels.argmax(logits)
    for top_p in (1.0, 0.9):
        filters = Filters(
            np.full(rows, _VOCABULARY), np.full(rows, top_p), np.full(rows, 1e-4), np.zeros(rows)
        )
        yield f"drawn, top_p={top_p}", kernels.draw(logits, temperatures, keys, filters)


def main() -> None:
    for kind, pages in ((CpuKernels, None), (CpuInt8Kernels, None), (CpuKernels, torch.int8)):
        torch.manual_seed(1)
        kernels = kind(1, pages)
        for results in (
            _products(kernels), _adapted(kernels), _attention(kernels, False), _attention(kernels, True),
            _tokens(kernels),
        ):  # fmt: skip
            for name, result in results:
                digest = hashlib.sha256(result.contiguous().numpy().tobytes()).hexdigest()
                print(f"{kind.__name__}, {kernels.cache_dtype}, {name}: {digest[:16]}")
        kernels.close()
    print("compiled" if work.stats.cache_misses else "loaded")


if __name__ == "__main__":
    main()
