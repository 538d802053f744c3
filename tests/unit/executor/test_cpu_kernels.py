"""The CPU kernels equal plain torch, read nothing they should not, and keep rows apart to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional

from executor_service.backends.base import ForwardRow
from executor_service.backends.forward_rows import ForwardRows
from executor_service.backends.torch_backend.cpu.kernels import CpuInt8Kernels, CpuKernels
from executor_service.backends.torch_backend.cpu.primitives.vector_math import exp32, gelu32
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.ops.kernels import (
    AttentionShape,
    AttentionWeights,
    Kernels,
    PlainKernels,
)
from executor_service.backends.torch_backend.ops.page_format import LayerCache
from executor_service.backends.torch_backend.ops.row_tensors import Batch
from executor_service.contract.plan import OutputMode, Sampling

CPU, WITH_FP16_PAGES, WITH_INT8_PAGES = CpuKernels(2), CpuInt8Kernels(2), CpuKernels(2, torch.int8)
ATTENDING = {"fp32": CPU, "fp16": WITH_FP16_PAGES, "int8": WITH_INT8_PAGES}
PLAIN = PlainKernels(torch.device("cpu"), torch.float32)
PLAIN_INT8_PAGES = PlainKernels(torch.device("cpu"), torch.float32, cache_dtype=torch.int8)


@pytest.fixture(autouse=True, params=["helped", "alone"])
def _helpers(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "alone":
        yield
        return
    with CPU.step(), WITH_FP16_PAGES.step(), WITH_INT8_PAGES.step():
        yield


@pytest.fixture(params=ATTENDING)
def attending(request: pytest.FixtureRequest) -> CpuKernels:
    return ATTENDING[request.param]


@pytest.mark.parametrize(("n", "k"), [(16, 8), (64, 33), (100, 64), (7, 5), (520, 72)])
def test_linear_equals_torch(n: int, k: int) -> None:
    torch.manual_seed(n)
    weight, bias = torch.randn(n, k), torch.randn(n)
    linear, biased = CPU.linear([weight[: n // 2], weight[n // 2 :]]), CPU.linear([weight], bias)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 100, 203):
        x, base = torch.randn(rows, k), torch.randn(rows, n)
        torch.testing.assert_close(linear(x), functional.linear(x, weight), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(biased(x), functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
        expected = base + functional.linear(x, weight, bias)
        added = base.clone()
        assert biased(x, add_to=added) is added
        torch.testing.assert_close(added, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(biased(x), functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    ids = torch.randint(n, (9,))
    assert torch.equal(linear.rows(ids), weight[ids])


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("n", "k"), [(16, 8), (48, 33), (88, 64), (7, 5)])
def test_gated_equals_torch(n: int, k: int, activation: Activation) -> None:
    torch.manual_seed(n)
    gate, up = torch.randn(n, k), torch.randn(n, k)
    gated = CPU.gated(gate, up, activation)
    for rows in (1, 2, 3, 6, 7, 110):
        x = torch.randn(rows, k)
        expected = activation.join(torch.cat((x @ gate.T, x @ up.T), dim=-1))
        torch.testing.assert_close(gated(x), expected, atol=1e-4, rtol=1e-4)


def test_products_are_bitwise_the_same_for_any_number_of_rows_and_threads() -> None:
    torch.manual_seed(0)
    weight, up, x = torch.randn(200, 72), torch.randn(200, 72), torch.randn(211, 72)
    linear, gated = CPU.linear([weight])(x), CPU.gated(weight, up)(x)
    for rows in (1, 2, 3, 4, 5, 7, 8, 33, 97):
        for kernels in (CPU, CpuKernels(1)):
            assert torch.equal(kernels.linear([weight])(x[:rows]), linear[:rows])
            assert torch.equal(kernels.gated(weight, up)(x[:rows]), gated[:rows])


def test_rms_norm_equals_torch() -> None:
    x, weight, residual = torch.randn(5, 99)[:, 20:92] * 10, torch.randn(72), torch.randn(5, 72)
    expected = functional.rms_norm(x, (72,), weight, 1e-5)
    torch.testing.assert_close(CPU.rms_norm(x, weight, 1e-5), expected)
    torch.testing.assert_close(CPU.rms_norm(x, weight, 1e-5, add_to=residual.clone()), residual + expected)


def test_gelu_is_torchs_and_keeps_nan() -> None:
    x = torch.linspace(-30, 30, 10_001)
    ours = torch.tensor([gelu32(value) for value in x.numpy()])
    torch.testing.assert_close(ours, functional.gelu(x, approximate="tanh"), atol=1e-6, rtol=1e-5)
    assert np.isnan(gelu32(np.float32(np.nan)))


def test_exp_is_exact_to_a_few_ulps_and_keeps_nan() -> None:
    x = np.linspace(-87, 87, 20_001).astype(np.float32)
    ours = np.array([exp32(value) for value in x])
    assert np.abs(ours / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
    assert exp32(np.float32(-1e30)) == exp32(np.float32(-np.inf)) == 0
    assert np.isnan(exp32(np.float32(np.nan)))


def weights_of(heads: int, kv_heads: int, dim: int, normed: bool, window: int) -> AttentionWeights:
    rotated = dim // 2 if dim in (16, 256) else dim  # of some heads a part is rotated
    angles = torch.arange(700)[:, None] * torch.rand(rotated // 2)[None, :]
    norm = torch.rand(dim) + 0.5 if normed else torch.empty(0)
    rotary = angles.cos(), angles.sin()
    return AttentionWeights(heads, kv_heads, dim, 1e-6, *rotary, norm, norm.flip(0), dim**-0.5, window)


_POISON = -128  # an int8 that no number is rounded to


def poison(cache: LayerCache, page: int | slice = slice(None)) -> None:
    """Fill a page, or all, with what must not be read."""
    for pages in (cache.k, cache.v, cache.scales):
        pages[page] = torch.nan if pages.is_floating_point() else _POISON


class Attention:
    """The same rows through two kernels, on the same pages."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, page_size: int, normed: bool = False, window: int = 0
    ) -> None:
        torch.manual_seed(5)
        self.shape, self.page_size = (kv_heads, dim), page_size
        self.w = weights_of(heads, kv_heads, dim, normed, window)

    def cache(self, kernels: Kernels, pages: int) -> LayerCache:
        cache = kernels.new_cache(pages, self.page_size, *self.shape)
        if kernels not in (PLAIN, PLAIN_INT8_PAGES):  # what was never written must never be multiplied
            poison(cache)
        return cache

    def run(
        self, kernels: Kernels, cache: LayerCache, rows: Sequence[ForwardRow], qkv: torch.Tensor
    ) -> torch.Tensor:
        batch = Batch.of(ForwardRows(rows), self.page_size, torch.device("cpu"))
        shape = AttentionShape(self.w.heads // self.w.kv_heads, self.w.head_dim)
        prepared = kernels.prepare(batch, shape)
        return kernels.attention(qkv.clone(), cache, prepared, self.w)

    def qkv(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, (self.w.heads + 2 * self.w.kv_heads) * self.w.head_dim)


def row(start: int, count: int, table: Sequence[int]) -> ForwardRow:
    tokens = np.zeros(count, np.int32)
    history = np.zeros(start + count, np.int32)
    block_table = np.array(table, np.int32)
    return ForwardRow(start, tokens, history, 0, block_table, 1, OutputMode.SAMPLE, Sampling())


SHAPES = [(9, 3, 64), (4, 4, 16), (8, 1, 32), (6, 2, 10), (32, 1, 24), (4, 1, 256)]
PAGE_SIZES, WINDOWS = (1, 7, 16, 32, 48), (0, 1, 40)
ATTENTIONS = [
    pytest.param(
        *shape, page_size, window, pages, helpers,
        marks=[pytest.mark.slow] if (i + j + k) % 3 or (i + j + m + n) % 2 else [],
    )
    for i, shape in enumerate(SHAPES)
    for j, page_size in enumerate(PAGE_SIZES)
    for k, window in enumerate(WINDOWS)
    for m, pages in enumerate(ATTENDING)
    for n, helpers in enumerate(("helped", "alone"))
]  # fmt: skip
"""All combinations. Those that are not slow have each two of these together but for pages and helpers, and
each shape and page size with all pages, helped or alone."""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "window", "attending", "_helpers"),
    ATTENTIONS,
    indirect=["attending", "_helpers"],
)
def test_attention_equals_dense_on_poisoned_pages(
    heads: int, kv_heads: int, dim: int, page_size: int, window: int, attending: CpuKernels
) -> None:
    attention = Attention(heads, kv_heads, dim, page_size, dim == 64, window)
    lengths = [1, page_size - 1 or 1, page_size, page_size + 1, 90, 300]
    pages, tables = 1, []
    for length in lengths:
        need = -(-(length + 20) // page_size)
        tables.append(list(range(pages, pages + need))[::-1])
        pages += need
    reference = PLAIN_INT8_PAGES if attending is WITH_INT8_PAGES else PLAIN
    cpu, plain = (attention.cache(kernels, pages + 1) for kernels in (attending, reference))
    # A number in the middle of two of int8 may be rounded up by one and down by the other.
    tolerance = {torch.float32: 2e-5, torch.float16: 1e-3, torch.int8: 5e-3}[cpu.k.dtype]
    first = [row(0, length, table) for length, table in zip(lengths, tables, strict=True)]
    counts = [1, 3, 1, 12, 1, 20]
    second = [row(n, count, table) for n, count, table in zip(lengths, counts, tables, strict=True)]
    for rows in (first, second):
        qkv = attention.qkv(sum(len(r.tokens) for r in rows))
        ours, theirs = (attention.run(k, c, rows, qkv) for k, c in ((attending, cpu), (reference, plain)))
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=5 * tolerance)
    for page in (0, pages):
        assert ((cpu.k[page] == _POISON) if attending is WITH_INT8_PAGES else cpu.k[page].isnan()).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_own_row_and_shows(bad: float, attending: CpuKernels) -> None:
    attention = Attention(4, 2, 16, 16)
    cpu = attention.cache(attending, 8)
    rows = [row(0, 20, [1, 2]), row(0, 20, [3, 4]), row(0, 1, [5])]
    qkv = attention.qkv(41)
    qkv[25] = bad
    out = attention.run(attending, cpu, rows, qkv)
    assert out[:20].isfinite().all()
    assert out[40].isfinite().all()
    assert not out[39].isfinite().any()


@pytest.mark.parametrize("_helpers", ["alone"], indirect=True)  # two pages are too few to share
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, 150_000.0, -150_000.0])
def test_what_is_infinite_in_a_query_or_a_page_shows_in_all_that_see_it(
    bad: float, part: str, attending: CpuKernels
) -> None:
    """Also where it scores -inf, which a softmax takes for a key that does not matter."""
    attention, first = Attention(2, 1, 16, 16), {"q": 0, "k": 32, "v": 48}[part]
    cache = attention.cache(attending, 4)
    infinite = np.isinf(bad) or (cache.k.dtype == torch.float16 and part != "q")
    for d in range(16):
        for sign in (1, -1):
            qkv = attention.qkv(20).abs()
            qkv[:, :32] *= sign
            qkv[15, first + d] = bad
            out = attention.run(attending, cache, [row(0, 20, [1, 2])], qkv).view(20, 2, 16)
            seen = out[15:16, :1] if part == "q" else out[15:]
            finite = seen.isfinite().all(2)
            assert not finite.any() if infinite else finite.all()


@pytest.mark.parametrize("value", [65_000.0, 65_504.0, 66_000.0])
def test_what_pages_can_not_hold_shows(value: float, attending: CpuKernels) -> None:
    attention = Attention(4, 2, 16, 16)
    cache, qkv = attention.cache(attending, 2), torch.full((1, 8 * 16), value)
    out = attention.run(attending, cache, [row(0, 1, [1])], qkv)
    holds = cache.v.dtype == torch.int8 or value <= torch.finfo(cache.v.dtype).max
    assert out.isfinite().all() == holds


@pytest.mark.parametrize(("page_size", "window"), [(16, 0), (16, 1), (16, 100), (16, 128), (7, 129)])
def test_a_query_does_not_depend_on_its_chunk_or_company(
    page_size: int, window: int, attending: CpuKernels
) -> None:
    attention = Attention(9, 3, 64, page_size, window=window)
    pages = -(-430 // page_size)
    whole, pieces = (attention.cache(attending, pages + 2) for _ in range(2))
    table = list(range(1, pages + 1))
    qkv, other = attention.qkv(430), attention.qkv(1)
    expected = attention.run(attending, whole, [row(0, 430, table)], qkv)
    first, outs = 0, []
    for count in (1, 7, 150, 16, 200, 55, 1):
        rows = [row(0, 1, [pages + 1]), row(first, count, table)]
        both = torch.cat([other, qkv[first : first + count]])
        outs.append(attention.run(attending, pieces, rows, both)[1:])
        first += count
    assert torch.equal(torch.cat(outs), expected)


@pytest.mark.parametrize("window", [1, 30, 100])
def test_what_lies_before_a_window_is_neither_read_nor_seen(window: int, attending: CpuKernels) -> None:
    attention = Attention(4, 2, 16, 16, window=window)
    cache, table, qkv = attention.cache(attending, 40), list(range(1, 31)), attention.qkv(423)
    for start, count in ((0, 400), (400, 1), (401, 22)):
        before = max(start + 1 - window, 0)  # the first position that a query of this step sees
        for page in table[: before // 16]:
            poison(cache, page)
        out = attention.run(attending, cache, [row(start, count, table)], qkv[start : start + count])
        assert out.isfinite().all()
