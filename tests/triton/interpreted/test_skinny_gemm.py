"""Products of few rows, interpreted, give what torch does, whatever rows there are beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.linear.linears import WideLinear
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import (
    MAX_ROWS,
    few_rows_launch,
    few_scaled_rows_launch,
)
from executor_service.backends.torch_backend.ops.kernels import PlainKernels
from executor_service.backends.torch_backend.ops.quantized import Fp8, Int8

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The launches inside, by kernel; they are made."""
    counts: Counter[str] = Counter()
    run = Launch.run

    def counting(launch: Launch) -> None:
        counts[launch.kernel.fn.__name__] += 1
        run(launch)

    with mock.patch.object(Launch, "run", counting):
        yield counts


def among_nan(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows, whose lines lie apart, with NaN between and behind them."""
    whole = torch.full((rows + 2, k + 7), torch.nan, dtype=dtype)
    whole[:rows, :k] = torch.randn(rows, k)
    return whole[:rows, :k]


@pytest.mark.parametrize(
    ("rows", "n", "k", "dtype"),
    [(1, 16, 128, BF16), (3, 19, 300, BF16), (4, 40, 90, torch.float16), (2, 33, 16, BF16)],
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_products_equal_those_in_fp32_rounded_once(
    rows: int, n: int, k: int, dtype: torch.dtype, *, biased: bool, add: bool
) -> None:
    torch.manual_seed(rows)
    x, weight, bias = among_nan(rows, k, dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    behind = torch.full((rows + 2, n), 7.0, dtype=dtype)
    out = behind[:rows]
    out.copy_(torch.randn(rows, n))
    expected = x.double() @ weight.double().T
    if biased:
        expected += bias
    if add:
        expected += out
    few_rows_launch(x, weight, bias if biased else None, out, add=add).run()
    exact = expected.to(dtype)
    # Sums that fall between two numbers may be rounded to either.
    assert (out == exact).float().mean() > 0.97
    torch.testing.assert_close(out, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    assert (behind[rows:] == 7).all()


def test_logits_are_not_rounded_to_16_bits() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(2, 64).to(BF16), torch.randn(50, 64).to(BF16)
    logits = WideLinear(weight, None)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T)


@pytest.mark.parametrize("form", [None, Int8(), Fp8()], ids=["bf16", "int8", "fp8"])
def test_a_row_is_bitwise_the_same_beside_any_others(form: Int8 | Fp8 | None) -> None:
    torch.manual_seed(2)
    linear = CudaKernels(CPU, BF16, form).linear([torch.randn(40, 96)])
    x = torch.randn(4, 96).to(BF16)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 3, 4):
        assert torch.equal(linear(x[:rows]), alone[:rows])
    beside = x.flip(0)
    beside[0] = torch.nan
    assert torch.equal(linear(beside)[1:], alone.flip(0)[1:])


def test_with_int8_a_row_is_bitwise_the_same_among_many() -> None:
    torch.manual_seed(3)
    linear = CudaKernels(CPU, BF16, Int8()).linear([torch.randn(40, 530)], torch.randn(40))
    x = torch.randn(MAX_ROWS + 1, 530).to(BF16)
    together = linear(x)
    for rows in range(1, MAX_ROWS + 1):
        assert torch.equal(linear(x[:rows]), together[:rows])


def test_digits_of_the_largest_magnitudes_are_summed_exactly() -> None:
    k = 12_288
    digits, weight = torch.full((4, k), -128, dtype=torch.int8), torch.full((16, k), -127, dtype=torch.int8)
    digits[2:] = 127  # the low ones
    scales, weight_scales, out = torch.full((2, 1), 2.0**-10), torch.ones(1, 16), torch.empty(2, 16)
    few_scaled_rows_launch(digits, scales, weight, weight_scales, out).run()
    high, low = torch.tensor(128 * 127.0 * k), torch.tensor(-127 * 127.0 * k)
    assert (out == (256 * high + low) * 2.0**-10).all()


def test_products_of_fp8_are_those_of_the_numbers_that_were_rounded() -> None:
    torch.manual_seed(4)
    x, weight = (torch.randn(rows, 80).to(torch.float8_e4m3fn) for rows in (3, 48))
    scales, weight_scales, out = torch.rand(3, 1), torch.rand(1, 48), torch.empty(3, 48)
    few_scaled_rows_launch(x, scales, weight, weight_scales, out).run()
    torch.testing.assert_close(out, x.float() @ weight.float().T * scales * weight_scales)


@pytest.mark.parametrize(
    ("form", "few", "many"),
    [
        (None, ["_few_rows_kernel"], []),
        (Int8(), ["_round_kernel", "_few_scaled_rows_kernel"], ["_round_kernel", "_scale_kernel"]),
        (Fp8(), ["_round_kernel", "_few_scaled_rows_kernel"], ["_round_kernel"]),
    ],
    ids=["bf16", "int8", "fp8"],
)
def test_the_number_of_rows_decides_which_product_is_launched(
    form: Int8 | Fp8 | None, few: list[str], many: list[str]
) -> None:
    linear = CudaKernels(CPU, BF16, form).linear([torch.randn(32, 48)])
    for rows in range(1, MAX_ROWS + 2):
        with counted() as counts:
            linear(torch.randn(rows, 48).to(BF16))
        assert counts == Counter(few if rows <= MAX_ROWS else many)


@pytest.mark.parametrize("biased", [False, True])
def test_layers_of_few_rows_equal_those_of_plain_torch(*, biased: bool) -> None:
    torch.manual_seed(5)
    weight, bias, x, base = (torch.randn(*size).to(BF16) for size in ((24, 70), (24,), (3, 70), (3, 24)))
    ours, theirs = (
        kind(CPU, BF16).linear([weight], bias if biased else None) for kind in (CudaKernels, PlainKernels)
    )
    torch.testing.assert_close(ours(x), theirs(x))
    added = [linear(x, add_to=base.clone()) for linear in (ours, theirs)]
    torch.testing.assert_close(*added, atol=0.1, rtol=0.02)  # rounded once, or twice
