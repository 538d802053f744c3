"""All blocks as one table of jobs give the bits that one operation after the other gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cpu.kernels import CpuInt8Kernels, CpuKernels
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.model.norms import Norms
from executor_service.backends.torch_backend.ops.kernels import AttentionShape, AttentionWeights, Block
from executor_service.backends.torch_backend.ops.row_tensors import Batch
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


def norm(dim: int) -> torch.Tensor:
    return torch.rand(dim) + 0.5


def block_of(kernels: CpuKernels, window: int, biased: bool, norms: str) -> Block:
    """`norms`: of what attention and MLP read ("before"), and of what they add to the residual ("after")."""
    width, angles = (HEADS + 2 * KV_HEADS) * DIM, torch.rand(99, DIM // 2)
    head_norm = norm(DIM) if biased else torch.empty(0)
    rotary = angles.cos(), angles.sin()
    attention = AttentionWeights(HEADS, KV_HEADS, DIM, EPS, *rotary, head_norm, head_norm, 0.3, window)
    before, after = (
        [norm(HIDDEN) if where in norms else None for _ in "ab"] for where in ("before", "after")
    )
    activation = Activation.SILU if norms == "before" else Activation.GELU
    return Block(
        before[0],
        kernels.linear([torch.randn(width, HIDDEN)], torch.randn(width) if biased else None),
        (norm(HEADS * DIM), norm(KV_HEADS * DIM)) if norms == "after" else None,
        attention,
        kernels.linear([torch.randn(HIDDEN, HEADS * DIM)], torch.randn(HIDDEN) if biased else None),
        after[0],
        before[1],
        kernels.gated(torch.randn(INNER, HIDDEN), torch.randn(INNER, HIDDEN), activation),
        kernels.linear([torch.randn(HIDDEN, INNER)]),
        after[1],
    )


@pytest.mark.parametrize("kind", [CpuKernels, CpuInt8Kernels])
@pytest.mark.parametrize("pages", [None, torch.int8])
@pytest.mark.parametrize(("biased", "norms"), [(False, "before"), (True, "before, after"), (False, "after")])
def test_a_stack_gives_the_bits_of_its_blocks(
    kind: type[CpuKernels], biased: bool, norms: str, pages: torch.dtype | None
) -> None:
    torch.manual_seed(3)
    kernels = kind(2, pages)
    blocks = [block_of(kernels, window, biased, norms) for window in (0, 9, 20)]
    stack, each = kernels.record(blocks, EPS), Norms(kernels, EPS)
    assert stack is not None
    one_by_one, stacked = ([kernels.new_cache(40, PAGE_SIZE, KV_HEADS, DIM) for _ in blocks] for _ in "ab")
    for starts, counts in (([0, 0, 0], [30, 1, 7]), ([30, 1, 7], [1, 1, 1]), ([31, 2, 8], [1, 5, 40])):
        batch = Batch.of(ForwardRows(rows_of(starts, counts)), PAGE_SIZE, torch.device("cpu"))
        prepared = kernels.prepare(batch, AttentionShape(HEADS // KV_HEADS, DIM))
        x = torch.randn(sum(counts), HIDDEN)
        with kernels.step():
            ours = stack(x, prepared, stacked).clone()
        for block, cache in zip(blocks, one_by_one, strict=True):
            qkv = block.qkv(each.of(x, block.attention_norm))
            first = 0
            for weight in block.qk_norms or ():
                part = qkv[:, first : first + len(weight)]
                part.copy_(each.of(part, weight))
                first += len(weight)
            attended = kernels.attention(qkv, cache, prepared, block.attention)
            each.add_linear(block.output, attended, block.output_norm, x)
            inner = block.gated(each.of(x, block.mlp_norm))
            each.add_linear(block.down, inner, block.down_norm, x)
        assert torch.equal(ours, x)
    for a, b in zip(one_by_one, stacked, strict=True):
        assert torch.equal(a.k, b.k)
        assert torch.equal(a.v, b.v)
        assert torch.equal(a.scales, b.scales)
    kernels.close()
