"""All blocks as one table of jobs give the bits that one operation after the other gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_service.backends.base import ForwardRow
from executor_service.backends.torch_backend.batch import Batch
from executor_service.backends.torch_backend.cpu.kernels import CpuInt8Kernels, CpuKernels
from executor_service.backends.torch_backend.kernels import AttentionShape, AttentionWeights, Block
from executor_service.contract.plan import OutputMode, Sampling

HIDDEN, INNER, HEADS, KV_HEADS, DIM, EPS = 40, 56, 6, 2, 16, 1e-6
PAGE_SIZE = 16


def rows_of(starts: list[int], counts: list[int]) -> list[ForwardRow]:
    rows, page = [], 1
    for start, count in zip(starts, counts, strict=True):
        pages = -(-(start + count) // PAGE_SIZE)
        table = np.arange(page, page + pages, dtype=np.int32)
        tokens, history = np.zeros(count, np.int32), np.zeros(start + count, np.int32)
        rows.append(ForwardRow(start, tokens, history, 0, table, 1, OutputMode.SAMPLE, Sampling()))
        page += pages
    return rows


def block_of(kernels: CpuKernels, biased: bool, window: int) -> Block:
    width, angles = (HEADS + 2 * KV_HEADS) * DIM, torch.rand(99, DIM // 2)
    norm = torch.rand(DIM) if biased else torch.empty(0)
    attention = AttentionWeights(
        HEADS, KV_HEADS, DIM, EPS, angles.cos(), angles.sin(), norm, norm, 0.3, window
    )
    return Block(
        torch.rand(HIDDEN),
        kernels.linear([torch.randn(width, HIDDEN)], torch.randn(width) if biased else None),
        attention,
        kernels.linear([torch.randn(HIDDEN, HEADS * DIM)], torch.randn(HIDDEN) if biased else None),
        torch.rand(HIDDEN),
        kernels.gated(torch.randn(INNER, HIDDEN), torch.randn(INNER, HIDDEN)),
        kernels.linear([torch.randn(HIDDEN, INNER)]),
    )


@pytest.mark.parametrize("kind", [CpuKernels, CpuInt8Kernels])
@pytest.mark.parametrize("biased", [False, True])
def test_a_stack_gives_the_bits_of_its_blocks(kind: type[CpuKernels], biased: bool) -> None:
    torch.manual_seed(3)
    kernels = kind(2)
    blocks = [block_of(kernels, biased, window) for window in (0, 9, 20)]
    stack = kernels.record(blocks, EPS)
    assert stack is not None
    one_by_one, stacked = ([kernels.new_cache(40, PAGE_SIZE, KV_HEADS, DIM) for _ in blocks] for _ in "ab")
    for starts, counts in (([0, 0, 0], [30, 1, 7]), ([30, 1, 7], [1, 1, 1]), ([31, 2, 8], [1, 5, 40])):
        batch = Batch.of(rows_of(starts, counts), PAGE_SIZE, torch.device("cpu"))
        prepared = kernels.prepare(batch, AttentionShape(HEADS // KV_HEADS, DIM))
        x = torch.randn(sum(counts), HIDDEN)
        with kernels.step():
            ours = stack(x, prepared, stacked).clone()
        for block, cache in zip(blocks, one_by_one, strict=True):
            qkv = block.qkv(kernels.rms_norm(x, block.attention_norm, EPS))
            block.output(kernels.attention(qkv, cache, prepared, block.attention), add_to=x)
            block.down(block.gated(kernels.rms_norm(x, block.mlp_norm, EPS)), add_to=x)
        assert torch.equal(ours, x)
    for a, b in zip(one_by_one, stacked, strict=True):
        assert torch.equal(a.k, b.k)
        assert torch.equal(a.v, b.v)
    kernels.close()
