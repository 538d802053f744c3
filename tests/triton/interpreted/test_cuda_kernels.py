"""`CudaKernels`, interpreted on CPU, computes what `PlainKernels` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_service.backends.base import ModelError
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.ops.kernels import (
    AttentionShape,
    AttentionWeights,
    Kernels,
    PlainKernels,
)
from executor_service.backends.torch_backend.ops.page_format import LARGEST
from executor_service.backends.torch_backend.ops.row_tensors import Batch
from tests.conformance.kit.tiny_model import write_tiny_model
from tests.support.untyped import present
from tests.unit.executor.rows import make_row

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "normed", "window", "dtype"),
    [
        (3, 1, 64, True, 0, torch.bfloat16),
        (2, 1, 10, False, 7, torch.float32),
        (2, 1, 20, True, 9, torch.float32),
    ],
)
def test_attention_equals_plain_torch(
    heads: int, kv_heads: int, dim: int, normed: bool, window: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    rotated = dim if dim % 10 else dim - 4
    angles = torch.arange(100)[:, None] * torch.rand(rotated // 2)[None, :]
    norm = torch.rand(dim) + 0.5 if normed else torch.empty(0)
    rotary = angles.cos(), angles.sin()
    w = AttentionWeights(heads, kv_heads, dim, 1e-6, *rotary, norm, norm.flip(0), 0.2, window)
    shape = AttentionShape(heads // kv_heads, dim, (0, window))
    tables = [[7, 2], [3], [9, 4]]
    steps = [[(0, 17), (0, 1), (0, 12)], [(17, 1), (1, 3), (12, 9)]]  # prefill; decode, verify, chunk
    kernels: list[Kernels] = [CudaKernels(CPU, dtype), PlainKernels(CPU, dtype)]
    caches = [k.new_cache(10, 16, kv_heads, dim) for k in kernels]
    caches[0].k.fill_(torch.nan)
    caches[0].v.fill_(torch.nan)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for step in steps:
        rows = [make_row([1] * (s + q), t, start=s) for (s, q), t in zip(step, tables, strict=True)]
        batch = Batch.of(ForwardRows(rows), 16, CPU)
        qkv = torch.randn(sum(q for _, q in step), (heads + 2 * kv_heads) * dim).to(dtype)
        ours, theirs = (
            k.attention(qkv.clone(), cache, k.prepare(batch, shape), w)
            for k, cache in zip(kernels, caches, strict=True)
        )
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        written = ~caches[0].k.isnan()
        assert torch.equal(written, caches[1].k != 0)
    assert caches[0].k[0].isnan().all()


class Over8Bits:
    """Two rows over pages of 8 bits, by the CUDA kernels and in plain torch."""

    heads, kv_heads, window = 6, 2, 11

    def __init__(self, dim: int, rotated: int, normed: bool, dtype: torch.dtype, pages: torch.dtype) -> None:
        torch.manual_seed(1)
        self.dim, self.dtype = dim, dtype
        angles = torch.arange(100)[:, None] * torch.rand(rotated // 2)[None, :]
        norm = torch.rand(dim) + 0.5 if normed else torch.empty(0)
        rotary = angles.cos(), angles.sin()
        self.w = AttentionWeights(self.heads, self.kv_heads, dim, 1e-6, *rotary, norm, norm, 0.2, self.window)
        self.kernels: list[Kernels] = [
            CudaKernels(CPU, dtype, cache_dtype=pages), PlainKernels(CPU, dtype, cache_dtype=pages)
        ]  # fmt: skip
        self.caches = [k.new_cache(10, 16, self.kv_heads, dim) for k in self.kernels]
        self.caches[0].scales.fill_(torch.nan)

    def qkv(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, (self.heads + 2 * self.kv_heads) * self.dim).to(self.dtype)

    def run(self, which: int, start: int, qkv: torch.Tensor) -> torch.Tensor:
        """All tokens but the last are one row's, from `start` on; the last is the other's first."""
        rows = [make_row([1] * (start + len(qkv) - 1), [7, 2], start=start), make_row([1], [3])]
        kernels = self.kernels[which]
        shape = AttentionShape(self.heads // self.kv_heads, self.dim, (self.window,))
        prepared = kernels.prepare(Batch.of(ForwardRows(rows), 16, CPU), shape)
        return kernels.attention(qkv.clone(), self.caches[which], prepared, self.w)


@pytest.mark.parametrize(
    ("dim", "rotated", "normed", "dtype", "pages"),
    [(64, 64, True, torch.bfloat16, torch.int8), (10, 6, False, torch.float32, torch.float8_e4m3fn)],
)
def test_pages_of_8_bits_equal_plain_torch(
    dim: int, rotated: int, normed: bool, dtype: torch.dtype, pages: torch.dtype
) -> None:
    over = Over8Bits(dim, rotated, normed, dtype, pages)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-3
    for start, count in ((0, 17), (17, 3)):
        qkv = over.qkv(count + 1)
        ours, theirs = (over.run(which, start, qkv) for which in range(2))
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    cache, expected = over.caches
    assert torch.equal(cache.v.float(), expected.v.float())  # what is not rotated, to the bit
    written = ~cache.scales[..., 1].isnan()
    assert torch.equal(cache.scales[..., 1][written], expected.scales[..., 1][written])
    assert written.sum() == 21 * over.kv_heads  # the other row's place was written twice


@pytest.mark.parametrize("pages", LARGEST)
def test_a_chunk_has_the_bits_that_it_has_in_one_piece(pages: torch.dtype) -> None:
    """It attends to its own keys and values as they were rounded, like the chunks after it."""
    over = Over8Bits(16, 16, False, torch.float32, pages)
    qkv = over.qkv(20)
    whole = over.run(0, 0, qkv)
    first = over.run(0, 0, qkv[:11])
    second = over.run(0, 10, qkv[10:])
    assert torch.equal(torch.cat([first[:-1], second]), whole)


def test_what_is_not_finite_shows_in_all_that_see_it() -> None:
    over = Over8Bits(16, 16, False, torch.float32, torch.int8)
    over.run(0, 0, over.qkv(18))
    qkv = over.qkv(5)
    qkv[1, -1], qkv[2, (over.heads + 1) * over.dim - 1] = torch.inf, torch.nan  # in a value, and in a key
    finite = over.run(0, 17, qkv).view(5, over.kv_heads, -1).isfinite()
    assert finite[:2, 0].all()
    assert not finite[1:4, 1].any()
    assert not finite[2:4, 0].any()
    assert finite[4].all()


def test_a_whole_model_gives_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path / "tiny", 128)
    prompt = np.random.default_rng(0).integers(0, 250, 12).tolist()

    def logits(kernels: Kernels) -> Sequence[np.ndarray]:
        monkeypatch.setattr(TorchBackend, "_kernels", lambda self: kernels)
        backend = TorchBackend(TorchConfig(path))
        backend.load(lambda what, done: None)
        backend.allocate(9, 16)
        outs = []
        for start, end, company in ((0, 10, False), (10, 12, True)):
            rows = [make_row(prompt[:end], [1, 2, 3], start=start, outputs=end - start)]
            if company:
                rows.append(make_row(prompt[:9], [5], outputs=1))
            outs += [present(out.logits) for out in backend.forward(rows)]
        backend.close()
        return outs

    for ours, theirs in zip(
        logits(CudaKernels(CPU, torch.float32)), logits(PlainKernels(CPU, torch.float32)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_head_dim_it_does_not_take_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="head_dim 260"):
        CudaKernels(CPU, torch.float32).new_cache(2, 16, 1, 260)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [3, 8])
def test_sums_over_ranks_have_the_bits_of_plain_torch(ranks: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    kernels = CudaKernels(CPU, dtype), PlainKernels(CPU, dtype)
    parts, before = torch.randn(ranks, 5, 700).to(dtype), torch.randn(5, 700).to(dtype)
    sums = [one.sum_parts(parts.clone()) for one in kernels]
    assert torch.equal(*sums)
    added = [before.clone(), before.clone()]
    for one, residual in zip(kernels, added, strict=True):
        assert one.sum_parts(parts.clone(), residual) is residual
    assert torch.equal(*added)
    assert not torch.equal(added[0], sums[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_norms_and_gates_equal_plain_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    ours, theirs = CudaKernels(CPU, dtype), PlainKernels(CPU, dtype)
    x, weight = torch.randn(5, 1100).to(dtype), torch.rand(1100) + 0.5
    close: dict[str, Any] = dict.fromkeys(("atol", "rtol"), 2e-6 if dtype == torch.float32 else 0.02)
    torch.testing.assert_close(ours.rms_norm(x, weight, 1e-6), theirs.rms_norm(x, weight, 1e-6), **close)
    parts = [kernels.rms_norm(x[:, 30:], weight[30:], 1e-6) for kernels in (ours, theirs)]
    torch.testing.assert_close(*parts, **close)
    added = [kernels.rms_norm(x, weight, 1e-6, add_to=x.flip(0)) for kernels in (ours, theirs)]
    torch.testing.assert_close(*added, **close)
    gate, up, down = torch.randn(1050, 1100) / 33, torch.randn(1050, 1100) / 33, torch.randn(1100, 1050) / 33
    for activation in Activation:
        inner, expected = (kernels.gated(gate, up, activation)(x) for kernels in (ours, theirs))
        torch.testing.assert_close(inner, expected, **close)
    for bias in (None, torch.randn(1100)):
        sums = [kernels.linear([down], bias)(inner, add_to=x.clone()) for kernels in (ours, theirs)]
        torch.testing.assert_close(*sums, **close)
