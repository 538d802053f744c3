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
    NARROW_ROWS,
    few_rows_launch,
    few_scaled_rows_launch,
    new_arrivals,
)
from executor_service.backends.torch_backend.cuda.linear.tuning import Tuning
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.ops.kernels import PlainKernels
from executor_service.backends.torch_backend.ops.quantized import Fp8, Int8
from tests.gpu.tuned_products import products

CPU = torch.device("cpu")
BF16 = torch.bfloat16
TUNINGS = sorted(
    {
        Tuning(how.outputs, how.lines, how.tile_bytes, programs=40)
        for how in (each.how for each in products(dry=False))
        if how is not None
    },
    key=str,
)
"""All that E11 times, as far as it matters to an interpreter; with parts of the inputs."""


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
    """Random rows, whose lines lie apart, with NaN between and after them."""
    whole = torch.full((rows + 2, k + 7), torch.nan, dtype=dtype)
    whole[:rows, :k] = torch.randn(rows, k)
    return whole[:rows, :k]


@pytest.mark.parametrize(
    ("rows", "n", "k", "dtype"),
    [
        (1, 16, 128, BF16),
        (NARROW_ROWS, 19, 300, BF16),
        (4, 40, 90, torch.float16),
        (2, 33, 16, BF16),
        (3, 1, 130, BF16),  # of a classification head
    ],
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
    few_rows_launch(x, weight, bias if biased else None, out, new_arrivals(CPU), add=add).run()
    exact = expected.to(dtype)
    # Sums that fall between two numbers may be rounded to either.
    assert (out == exact).float().mean() > 0.97
    torch.testing.assert_close(out, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    assert (behind[rows:] == 7).all()


@pytest.mark.parametrize(
    ("rows", "n", "k", "parts"),
    [(1, 16, 128, 1), (NARROW_ROWS, 19, 300, 1), (4, 40, 1090, 3), (2, 33, 2048, 8), (2, 24, 1300, 4)],
)
@pytest.mark.parametrize("activation", [None, *Activation])
@pytest.mark.parametrize("biased", [False, True])
def test_gates_in_a_product_are_those_in_fp32(
    rows: int, n: int, k: int, parts: int, activation: Activation | None, *, biased: bool
) -> None:
    torch.manual_seed(rows)
    x, bias = among_nan(rows, k, BF16), torch.randn(2 * n).to(BF16)
    weight, arrivals = (torch.randn(2 * n, k) / k**0.5).to(BF16), new_arrivals(CPU)
    if activation is None:
        weight, bias = weight[:n].contiguous(), bias[:n].contiguous()
    out = torch.full((rows, n), torch.nan, dtype=BF16)
    launch = few_rows_launch(x, weight, bias if biased else None, out, arrivals, activation=activation)
    assert launch.grid[1] == parts
    launch.run()
    expected = x.double() @ weight.double().T + (bias if biased else 0)
    if activation is not None:
        expected = activation.join(expected)
    torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)
    assert not arrivals.any()  # as the next launch needs them


@pytest.mark.parametrize("add", [False, True])
def test_parts_of_a_product_add_up_to_it(*, add: bool) -> None:
    """Whatever the dtype, in each of several launches that share what counts the parts that are done."""
    arrivals = new_arrivals(CPU)
    for dtype, out_dtype in ((BF16, BF16), (torch.float16, torch.float16), (BF16, torch.float32)):
        x, weight = torch.randn(3, 700).to(dtype), torch.randn(20, 700).to(dtype)
        out = torch.randn(3, 20).to(out_dtype)
        expected = x.double() @ weight.double().T + (out if add else 0)
        launch = few_rows_launch(x, weight, None, out, arrivals, add=add)
        assert launch.grid == (2, 3, 1)
        launch.run()
        torch.testing.assert_close(out, expected.to(out_dtype), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("n", [16, 960, 1024, 2048, 4096, 24_576])
def test_products_have_programs_for_a_device_and_parts_that_follow_from_the_layer_alone(
    n: int,
) -> None:
    for k in (576, 1024, 2048, 4096):
        grids = set()
        for rows in range(1, NARROW_ROWS + 1):
            x, out = (torch.empty(rows, size, dtype=BF16, device="meta") for size in (k, n))
            weight = torch.empty(n, k, dtype=BF16, device="meta")
            launch = few_rows_launch(x, weight, None, out, new_arrivals(CPU))
            part = launch.arguments["part"]
            assert isinstance(part, int)
            assert part * launch.grid[1] >= k > part * (launch.grid[1] - 1)
            assert launch.grid[0] <= len(new_arrivals(CPU)) or launch.grid[1] == 1
            grids.add(launch.grid)
        assert len(grids) == 1
        [(blocks, parts, _)] = grids
        assert blocks * parts >= 128 or part <= 3 * 128


@pytest.mark.parametrize("how", TUNINGS, ids=str)
def test_a_product_is_right_however_it_is_tuned(how: Tuning) -> None:
    torch.manual_seed(7)
    arrivals = new_arrivals(CPU)
    x, weight = torch.randn(how.lines - 1, 600).to(BF16), (torch.randn(130, 600) / 24).to(BF16)
    expected = x.double() @ weight.double().T
    out, gated = torch.ones(len(x), 130).to(BF16), torch.empty(len(x), 65, dtype=BF16)
    few_rows_launch(x, weight, None, out, arrivals, add=True, how=how).run()
    torch.testing.assert_close(out, (expected + 1).to(BF16), rtol=0.02, atol=0.02)
    few_rows_launch(x, weight, None, gated, arrivals, activation=Activation.SILU, how=how).run()
    joined = Activation.SILU.join(expected.to(BF16))
    torch.testing.assert_close(gated, joined, rtol=0.03, atol=0.1)
    assert not arrivals.any()


def test_logits_are_not_rounded_to_16_bits() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(2, 64).to(BF16), torch.randn(50, 64).to(BF16)
    logits = WideLinear(weight, new_arrivals(CPU))(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T)


@pytest.mark.parametrize("form", [None, Int8(), Fp8()], ids=["bf16", "int8", "fp8"])
def test_a_row_is_bitwise_the_same_beside_any_others(form: Int8 | Fp8 | None) -> None:
    torch.manual_seed(2)
    linear = CudaKernels(CPU, BF16, form).linear([torch.randn(40, 96)])
    x = torch.randn(MAX_ROWS if form else NARROW_ROWS, 96).to(BF16)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in range(2, len(x) + 1):
        assert torch.equal(linear(x[:rows]), alone[:rows])
    beside = x.flip(0)
    beside[0] = torch.nan
    assert torch.equal(linear(beside)[1:], alone.flip(0)[1:])


def test_a_gated_row_is_bitwise_the_same_beside_any_others() -> None:
    torch.manual_seed(2)
    layer = CudaKernels(CPU, BF16).gated(torch.randn(40, 600), torch.randn(40, 600))
    x = torch.randn(NARROW_ROWS, 600).to(BF16)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(2, len(x) + 1):
        assert torch.equal(layer(x[:rows]), alone[:rows])
    beside = x.flip(0)
    beside[0] = torch.nan
    found = layer(beside)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], alone.flip(0)[1:])


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, NARROW_ROWS, NARROW_ROWS + 1])
def test_gated_layers_equal_those_of_plain_torch(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(6)
    gate, up, x = torch.randn(24, 48) / 7, torch.randn(24, 48) / 7, torch.randn(rows, 48).to(dtype)
    ours, theirs = (kind(CPU, dtype).gated(gate, up)(x) for kind in (CudaKernels, PlainKernels))
    torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)


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
    most = MAX_ROWS if form else NARROW_ROWS
    for rows in range(1, most + 2):
        with counted() as counts:
            linear(torch.randn(rows, 48).to(BF16))
        assert counts == Counter(few if rows <= most else many)


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
