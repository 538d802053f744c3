"""Products over numbers and scales as checkpoints store them: those of the dequantized weight."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from executor_service.backends.torch_backend.cpu.kernels import CpuInt8Kernels, CpuKernels
from executor_service.backends.torch_backend.cpu.layers.linear_int8 import unpack
from executor_service.backends.torch_backend.cpu.primitives.registers import CONVERTS_FP16
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers
from executor_service.backends.torch_backend.ops.kernels import PlainKernels
from executor_service.backends.torch_backend.ops.quantized import Fp8, Int8

CPU, INT8 = CpuKernels(2), CpuInt8Kernels(2)
FP8 = torch.float8_e4m3fn
DTYPES = [torch.int8, *([FP8] if CONVERTS_FP16 else [])]


def drawn(n: int, k: int, dtype: torch.dtype, group: int | None = None) -> ScaledNumbers:
    """All numbers of the dtype that are finite, and a scale for each row or group."""
    groups = torch.arange(k) // (group or k)
    scales = 0.1 + torch.rand(n, int(groups[-1]) + 1)
    bits = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    bits.view(-1)[: min(256, n * k)] = torch.arange(-128, 128, dtype=torch.int8)[: n * k]
    if dtype == FP8:
        bits[(bits & 0x7F) == 0x7F] = 0x7E  # NaN
    return ScaledNumbers(bits.view(dtype), scales, groups)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 8, 24])
@pytest.mark.parametrize(("n", "k"), [(16, 8), (100, 72), (64, 33), (7, 5), (520, 24)])
def test_linear_layers_compute_with_the_dequantized_weight(
    n: int, k: int, group: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(n)
    weight, bias = drawn(n, k, dtype, group), torch.randn(n)
    assert CPU.keeps(weight)
    half = slice(n // 2), slice(n // 2, n)
    linear, exact = CPU.linear([weight.part(rows) for rows in half], bias), weight.plain()
    for rows in (1, 2, 3, 5, 7, 13, 100):
        x, base = torch.randn(rows, k), torch.randn(rows, n)
        expected = functional.linear(x.double(), exact.double(), bias.double())
        tolerance = 1e-6 * float((x.abs() @ exact.abs().T).max())
        assert (linear(x) - expected).abs().max() < tolerance
        assert (linear(x, add_to=base.clone()) - base - expected).abs().max() < 2 * tolerance
        assert torch.equal(linear(x)[:1], linear(x[:1]))
    ids = torch.randint(n, (9,))
    assert torch.equal(linear.rows(ids), exact[ids])
    assert linear.bytes() < 16 * -(-n // 16) * (k + 4 * weight.scales.shape[1]) + 64 * -(-n // 16) + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [None, 24])
def test_gated_layers_compute_with_the_dequantized_weights(group: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate, up = drawn(88, 72, dtype, group), drawn(88, 72, dtype, group)
    gated = CPU.gated(gate, up)
    for rows in (1, 3, 7, 100):
        x = 0.01 * torch.randn(rows, 72)
        expected = functional.silu(x @ gate.plain().T) * (x @ up.plain().T)
        torch.testing.assert_close(gated(x), expected, atol=1e-3, rtol=1e-4)
        assert torch.equal(gated(x)[-1:], gated(x[-1:]))


def test_parts_that_differ_are_dequantized() -> None:
    torch.manual_seed(2)
    one, other, tensor = drawn(16, 48, torch.int8), drawn(16, 48, torch.int8, 24), torch.randn(16, 48)
    x = torch.randn(5, 48)
    whole = CPU.linear([one.plain(), other.plain(), tensor])
    assert torch.equal(CPU.linear([one, other, tensor])(x), whole(x))
    assert torch.equal(CPU.gated(one, other)(x), CPU.gated(one.plain(), other.plain())(x))
    assert torch.equal(CPU.gated(other, tensor)(x), CPU.gated(other.plain(), tensor)(x))


def test_groups_in_any_other_order_and_wider_numbers_are_not_kept() -> None:
    weight = drawn(16, 48, torch.int8, 24)
    shuffled = ScaledNumbers(weight.numbers, weight.scales, weight.groups.flip(0))
    wide = ScaledNumbers(weight.numbers.short(), weight.scales, weight.groups)
    assert CPU.keeps(weight)
    assert not CPU.keeps(shuffled)
    assert not CPU.keeps(wide)
    assert not CPU.keeps(weight.part(slice(None), slice(12, 48)))  # begins within a group
    assert CPU.keeps(weight.part(slice(None), slice(24, 48)))
    assert not INT8.keeps(weight)
    assert INT8.keeps(drawn(16, 48, torch.int8))


def test_int8_layers_keep_the_integers_and_scales_of_a_file() -> None:
    torch.manual_seed(3)
    weight, other = drawn(40, 33, torch.int8), torch.randn(40, 33)
    linear = INT8.linear([weight, other])
    exact = torch.cat([weight.plain(), INT8.linear([other]).rows(torch.arange(40))])
    assert torch.equal(linear.rows(torch.arange(80)), exact)
    x = torch.randn(9, 33)
    assert (linear(x) - x @ exact.T).abs().max() < 1e-4 * (x.abs() @ exact.abs().T).max()
    gated = INT8.gated(weight, weight)
    product = x @ weight.plain().T
    torch.testing.assert_close(
        gated(0.01 * x), functional.silu(0.01 * product) * 0.01 * product, rtol=1e-2, atol=0.3
    )


@pytest.mark.parametrize("k", [2, 576, 12_288])
def test_no_sum_overflows_with_the_smallest_int8(k: int) -> None:
    weight = drawn(16, k, torch.int8)
    weight.numbers.fill_(-128)
    x = torch.ones(1, k)
    torch.testing.assert_close(INT8.linear([weight])(x), x @ weight.plain().T, rtol=1e-4, atol=0)
    panels, _ = unpack(INT8.linear([weight])._panels)  # type: ignore[attr-defined]
    assert int(panels.min()) == -128


@pytest.mark.parametrize(("form", "dtype"), [(Int8(), torch.int8), (Fp8(), FP8)])
def test_the_products_of_torch_keep_the_numbers_and_scales_of_a_file(
    form: Int8 | Fp8, dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    kernels = PlainKernels(torch.device("cpu"), torch.bfloat16, form)
    weight, other = drawn(40, 32, dtype), torch.randn(40, 32)
    assert kernels.keeps(weight)
    assert not kernels.keeps(drawn(40, 32, dtype, 16))
    linear = kernels.linear([other, weight])
    ids = torch.arange(40, 80)
    assert torch.equal(linear.rows(ids), weight.plain().bfloat16())
    x = torch.randn(9, 32).bfloat16()
    expected = x.float() @ weight.plain().T
    assert (linear(x)[:, 40:].float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_magnitudes_find_what_is_not_finite() -> None:
    weight = drawn(16, 48, FP8, 24)
    assert (weight.magnitudes()[:, 0] >= weight.plain().abs()[:, :24].amax(1)).all()
    weight.numbers.view(torch.uint8)[3, 5] = 0xFF
    assert weight.magnitudes()[3].isnan().all()
    assert weight.magnitudes()[:3].isfinite().all()
    whole = drawn(16, 48, torch.int8)
    whole.numbers[2, 3] = -128
    assert torch.equal(whole.magnitudes()[2], 128 * whole.scales[2])
