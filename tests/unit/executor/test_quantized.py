"""Products of 8 bits: what is rounded and how far, the digits of int8, and its exact sums for any rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.ops.kernels import PlainKernels, PlainLinear
from executor_service.backends.torch_backend.ops.quantized import Format, Fp8, Int8
from tests.bench.perplexity import SameInt8

CPU = torch.device("cpu")
FORMATS: list[Format] = [Int8(), Fp8()]
ROWS = [1, 2, 16, 17, 31, 32, 33, 97]
SHAPES = [(96, 64), (150, 88), (7, 5), (33, 1), (5000, 3)]

every_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)


def kernels(form: Format, dtype: torch.dtype = torch.float32) -> PlainKernels:
    return PlainKernels(CPU, dtype, form)


def whole(rounded: torch.Tensor, form: Format) -> torch.Tensor:
    """What `Format.round` gave, as numbers fp32 [rows, k]: digits put together."""
    digits = rounded.float().chunk(form.digits)
    return digits[0] if form.digits == 1 else 256 * digits[0] + digits[1]


def integers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T by way of int64 sums of numbers of 16 and of 8 bits."""
    factors = [m.abs().amax(1, keepdim=True) / most for m, most in ((x, 32_639), (weight, 127))]
    a, b = ((m / f).round().long() for m, f in zip((x, weight), factors, strict=True))
    return (a @ b.T).float() * factors[0] * factors[1].T


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_equals_sums_of_integers_to_the_last_bit(n: int, k: int) -> None:
    torch.manual_seed(n)
    weight, bias, x, base = torch.randn(n, k), torch.randn(n), torch.randn(19, k), torch.randn(19, n)
    expected = integers(x, weight)
    for form in (Int8(), SameInt8()):
        linear = kernels(form).linear([weight[: n // 2], weight[n // 2 :]], bias)
        assert torch.equal(linear(x), expected + bias)
        added = base.clone()
        assert linear(x, add_to=added) is added
        assert torch.equal(added, base + (expected + bias))
        gated = kernels(form).gated(weight, -2 * weight)(x)
        torch.testing.assert_close(gated, functional.silu(expected) * integers(x, -2 * weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_int8_are_bitwise_the_same_for_any_number_of_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, up, x = torch.randn(200, 72), torch.randn(200, 72), torch.randn(97, 72).to(dtype)
    ops: list[Any] = [kernels(Int8(), dtype).linear([weight]), kernels(Int8(), dtype).gated(weight, up)]
    for op in ops:
        together = op(x)
        for rows in ROWS:
            for first in (0, 97 - rows):
                assert torch.equal(op(x[first : first + rows]), together[first : first + rows])


@pytest.mark.parametrize("k", [16, 1536, 12_288])
def test_no_sum_of_int8_overflows_at_the_extremes(k: int) -> None:
    signs = torch.where(torch.randn(3, k) > 0, 1.0, -1.0)
    x = torch.cat([torch.ones(1, k), -torch.ones(1, k), signs]) * 3.0
    sums = kernels(Int8()).linear([x])(x)
    assert (sums - integers(x, x)).abs().max() <= 9 * k * 2**-21  # of the sum of magnitudes


def test_more_inputs_than_a_sum_of_int8_can_take_are_refused() -> None:
    assert 128**2 * Int8.max_inputs < 2**31
    with pytest.raises(ModelError, match=r"131072 inputs of a linear layer are too many for torch\.int8"):
        kernels(Int8()).linear([torch.ones(1, 131_072)])


def test_digits_make_every_number_of_16_bits() -> None:
    x = torch.arange(-32_639.0, 32_640.0)
    rounded, scales = Int8().round(x[None])
    assert scales[0] == 1
    assert torch.equal(whole(rounded, Int8())[0, : len(x)], x)


@pytest.mark.parametrize(("n", "k"), SHAPES[:4])
def test_products_of_int8_have_sizes_that_cuda_takes(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    product, sizes = torch._int_mm, []

    def seen(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        sizes.append((*x.shape, weight.shape[1]))
        assert x.is_contiguous()
        assert weight.T.is_contiguous()
        return product(x, weight)

    monkeypatch.setattr(torch, "_int_mm", seen)
    linear = kernels(Int8()).linear([torch.randn(n, k)])
    for rows in ROWS:
        assert linear(torch.randn(rows, k)).shape == (rows, n)
    assert [size[0] for size in sizes] == [32, 32, 32, 34, 62, 64, 66, 194]
    assert all(inputs % 8 == 0 and outputs % 8 == 0 for _, inputs, outputs in sizes)


@every_format
def test_rounding_is_to_the_nearest_number_of_the_format(form: Format) -> None:
    torch.manual_seed(1)
    x = torch.randn(9, 40)
    x[:, 3] *= 300  # an outlier, as real models have them
    rounded, scales = form.round(x)
    rows = max(9, form.min_rows)
    assert rounded.shape == (form.digits * rows, 48)
    assert scales.shape == (rows, 1)
    assert rounded.dtype == form.dtype
    assert not rounded[:, 40:].float().any()
    numbers, scales = whole(rounded, form), scales[:9]
    assert not numbers[9:].any()
    numbers = numbers[:9]
    assert torch.equal(numbers.abs().amax(1), torch.full((9,), form.largest_activation))
    relative, least = (2**-4, 2**-10) if form.dtype.is_floating_point else (0.0, 0.5)
    error = (numbers[:, :40] * scales - x).abs()
    assert (error <= 1.001 * (relative * x.abs()).maximum(least * scales)).all()


@every_format
def test_products_are_those_of_what_was_rounded(form: Format) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(150, 88), torch.randn(5, 88)
    linear = kernels(form, torch.bfloat16).linear([weight])
    rounded, scales = form.round(x.bfloat16())
    expected = (whole(rounded, form) * scales)[:5, :88] @ linear.rows(torch.arange(150)).float().T
    out = linear(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    torch.testing.assert_close(out.float(), expected, atol=0.2, rtol=0.02)
    assert linear.bytes() < 0.62 * 2 * weight.numel()


@every_format
def test_what_is_not_finite_stays_in_its_own_row(form: Format) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(40, 33), torch.randn(6, 33)
    linear, gated = kernels(form).linear([weight]), kernels(form).gated(weight, weight)
    expected = linear(x)
    x[1, 5], x[3, 32], x[4, 0] = torch.nan, torch.inf, -torch.inf
    for out in (linear(x), gated(x)):
        assert not out[[1, 3, 4]].isfinite().any()
        assert out[[0, 2, 5]].isfinite().all()
    assert torch.equal(linear(x)[[0, 2, 5]], expected[[0, 2, 5]])


@every_format
def test_a_channel_that_is_not_finite_is_not_hidden(form: Format) -> None:
    weight = torch.randn(20, 8)
    weight[3, 1], weight[17, 2] = torch.nan, torch.inf
    out = kernels(form).linear([weight])(torch.randn(4, 8))
    assert not out[:, [3, 17]].isfinite().any()
    assert out.isfinite().all(0).sum() == 18


@every_format
def test_zeros_and_what_is_next_to_zero_give_zeros(form: Format) -> None:
    weight, x = torch.randn(20, 8), torch.zeros(3, 8)
    x[1], x[2] = 1e-38, 1e-45
    assert not kernels(form).linear([weight])(x).any()
    assert not kernels(form).linear([weight * 0])(torch.randn(3, 8)).any()


@every_format
def test_the_output_layer_stays_wide(form: Format) -> None:
    assert isinstance(kernels(form).head(torch.randn(20, 8)), PlainLinear)


def test_a_device_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ModelError, match=r"fp8 needs compute capability 8\.9; 'cuda:0' has 8\.6"):
        Fp8().check(torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    Fp8().check(torch.device("cuda:0"))
    for form in FORMATS:
        form.check(CPU)
        with pytest.raises(ModelError, match="runs on cpu and cuda only, not on 'meta'"):
            form.check(torch.device("meta"))
