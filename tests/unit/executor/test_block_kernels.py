"""Products over weights in blocks and activations in blocks of int8: their arithmetic, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from executor_service.backends.torch_backend.cpu.gemm.block_layout import BLOCK, Layout
from executor_service.backends.torch_backend.cpu.gemm.block_products import (
    ANY,
    BYTES,
    BYTES_MINIMA,
    NIBBLES,
    NIBBLES_MINIMA,
    WIDE_BYTES_16,
    WIDE_BYTES_MINIMA,
    WIDE_NIBBLES_MINIMA,
)
from executor_service.backends.torch_backend.cpu.kernels import CpuBlockKernels
from executor_service.backends.torch_backend.cpu.layers.linear_blocks import layout_of
from executor_service.backends.torch_backend.cpu.primitives.registers import CONVERTS_FP16
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers

CPU = CpuBlockKernels(2)
DEFAULT = [NIBBLES_MINIMA, BYTES]  # of the default model; the others are compiled in slow tests only
OTHERS = [NIBBLES, BYTES_MINIMA, WIDE_NIBBLES_MINIMA, WIDE_BYTES_MINIMA, WIDE_BYTES_16, ANY]
LAYOUTS = [
    *DEFAULT,
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in OTHERS),
]
needs_fp16 = pytest.mark.skipif(not CONVERTS_FP16, reason="this processor keeps all scales in fp32")


def drawn(layout: Layout, n: int, k: int) -> ScaledNumbers:
    """A weight for which this is the smallest layout, with all numbers that it holds."""
    low, high = (0 if layout.minima else -8, 16 if layout.minima else 8) if layout.nibbles else (-128, 128)
    numbers = torch.randint(low, high, (n, k), dtype=torch.int8)
    if layout.nibbles and layout.minima and n * k:
        numbers[0, 0] = 15
    count = k // layout.group
    scales = (0.01 * torch.randn(n, count)).half().float()
    minima = (0.1 * torch.randn(n, count)).half().float() if layout.minima else None
    if layout.wide:
        scales *= 1.0001
    return ScaledNumbers(numbers, scales, torch.arange(k) // layout.group, minima)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, k] in blocks: integers [rows, blocks, 32] and scales [rows, blocks]."""
    blocks = x.view(len(x), -1, BLOCK)
    largest = blocks.abs().amax(2)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return (blocks * inverse[..., None]).round(), largest / 127


def expected(x: torch.Tensor, weight: ScaledNumbers) -> torch.Tensor:
    """The product of what both are rounded to, in fp64."""
    numbers, scales = quantized(x)
    rounded = (numbers.double() * scales[..., None].double()).flatten(1)
    return rounded @ weight.plain().double().T


def fused(one: np.ndarray, other: np.ndarray, total: np.ndarray) -> np.ndarray:
    """one * other + total in fp64, where the product of two fp32 is exact, and then one rounding to fp32."""
    return (one.astype(np.float64) * other + total).astype(np.float32)


def arithmetic(x: torch.Tensor, weight: ScaledNumbers, group: int) -> np.ndarray:
    """The product as `tile_blocks` defines it, in numpy: exact sums of groups, added in fp32 along K."""
    numbers, x_scales = (one.numpy() for one in quantized(x))
    x_groups = numbers.reshape(len(x), -1, group).astype(np.int64)
    w_groups = weight.numbers.numpy().reshape(weight.shape[0], -1, group).astype(np.int64)
    total = np.zeros((len(x), weight.shape[0]), np.float32)
    for at in range(x_groups.shape[1]):
        xs, scale = x_groups[:, at], x_scales[:, at * group // BLOCK, None]
        sums = (xs @ w_groups[:, at].T).astype(np.float32)
        total = fused(sums * weight.scales.numpy()[:, at], scale, total)
        if weight.minima is not None:
            sum_of_x = xs.sum(1, keepdims=True).astype(np.float32) * scale
            total = fused(weight.minima.numpy()[:, at], sum_of_x, total)
    return total


@needs_fp16
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_products_have_the_bits_of_the_arithmetic_in_numpy(layout: Layout) -> None:
    """Whatever the instructions: `test_cpu_registers.py` repeats this file for those of AVX2."""
    torch.manual_seed(1)
    weight, x = drawn(layout, 40, 576), torch.randn(17, 576)
    found = CPU.linear([weight], None)(x).numpy()
    wanted = arithmetic(x, weight, layout.group)
    assert np.array_equal(found.view(np.int32), wanted.view(np.int32))


@needs_fp16
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize(("n", "k"), [(64, 96), (40, 576), (7, 32)])
def test_products_are_those_of_numbers_and_quantized_activations(layout: Layout, n: int, k: int) -> None:
    torch.manual_seed(n)
    weight, bias = drawn(layout, n, k), torch.randn(n)
    assert CPU.keeps(weight)
    assert layout_of([weight]) == layout
    half = slice(n // 2), slice(n // 2, n)
    linear = CPU.linear([weight.part(rows) for rows in half], bias)
    x = torch.randn(14, k)
    x[3, :BLOCK] = 0
    wanted = expected(x, weight) + bias
    exact = functional.linear(x.double(), weight.plain().double(), bias.double())
    found = linear(x)
    magnitude = (x.abs() @ weight.plain().abs().T).max()
    assert (found - wanted).abs().max() < 2e-6 * magnitude
    assert 0 < (found - exact).abs().max() < 6e-3 * magnitude
    base = torch.randn(14, n)
    assert (linear(x, add_to=base.clone()) - base - wanted).abs().max() < 4e-6 * magnitude
    ids = torch.randint(n, (9,))
    assert torch.equal(linear.rows(ids), weight.plain()[ids])
    assert linear.bytes() == -(-n // 16) * (k // BLOCK) * layout.block_bytes


@needs_fp16
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_row_has_the_same_bits_in_every_batch_and_on_every_number_of_threads(layout: Layout) -> None:
    torch.manual_seed(1)
    weight, gate = drawn(layout, 200, 160), drawn(layout, 88, 160)
    x = torch.randn(65, 160)
    alone = CpuBlockKernels(1)
    one: list[Any] = [alone.linear([weight]), alone.gated(gate, gate)]
    two: list[Any] = [CPU.linear([weight]), CPU.gated(gate, gate)]
    whole = [layer(x) for layer in one]
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 33, 64):
        for first in (0, 65 - rows):
            some = slice(first, first + rows)
            for layer, result in zip((*one, *two), (*whole, *whole), strict=True):
                assert torch.equal(layer(x[some].contiguous()), result[some])
    alone.close()


def test_gated_layers_compute_with_the_dequantized_weights() -> None:
    torch.manual_seed(2)
    gate, up = drawn(NIBBLES_MINIMA, 88, 96), drawn(NIBBLES_MINIMA, 88, 96)
    gated = CPU.gated(gate, up)
    x = 0.1 * torch.randn(9, 96)
    wanted = functional.silu(expected(x, gate)) * expected(x, up)
    torch.testing.assert_close(gated(x).double(), wanted, atol=1e-5, rtol=1e-4)


def test_a_row_that_is_not_finite_is_nan_and_changes_no_other() -> None:
    torch.manual_seed(3)
    linear, x = CPU.linear([drawn(NIBBLES_MINIMA, 32, 64)]), torch.randn(5, 64)
    fine = linear(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[2, 40] = value
        found = linear(x)
        assert found[2].isnan().all()
        assert torch.equal(found[[0, 1, 3, 4]], fine[[0, 1, 3, 4]])
    x[2] = 1e-38
    assert (linear(x)[2].abs() < 1e-30).all()


def test_parts_of_different_formats_keep_their_numbers() -> None:
    torch.manual_seed(4)
    parts = [drawn(layout, 16, 64) for layout in (NIBBLES, BYTES)]
    assert layout_of(parts) == BYTES or not CONVERTS_FP16
    x = torch.randn(3, 64)
    linear = CPU.linear(parts)
    assert torch.equal(linear.rows(torch.arange(32)), torch.cat([part.plain() for part in parts]))
    wanted = torch.cat([expected(x, part) for part in parts], 1)
    torch.testing.assert_close(linear(x).double(), wanted, atol=1e-4, rtol=1e-4)


def test_a_layer_that_is_quantized_in_part_is_computed_in_fp32() -> None:
    torch.manual_seed(5)
    block, tensor, x = drawn(BYTES, 16, 64), torch.randn(16, 64), torch.randn(3, 64)
    mixed: Sequence[ScaledNumbers | torch.Tensor] = [block, tensor]
    assert torch.equal(CPU.linear(mixed)(x), CPU.linear([block.plain(), tensor])(x))
    assert torch.equal(CPU.gated(block, tensor)(x), CPU.gated(block.plain(), tensor)(x))


def test_what_no_kernel_multiplies_is_not_kept() -> None:
    weight = drawn(BYTES, 16, 128)
    assert CPU.keeps(weight.part(slice(None), slice(32, 96)))
    assert not CPU.keeps(weight.part(slice(None), slice(16, 80)))  # begins within a block
    assert not CPU.keeps(weight.part(slice(None), slice(0, 48)))  # ends within one
    narrow = ScaledNumbers(weight.numbers, torch.ones(16, 16), torch.arange(128) // 8)
    assert not CPU.keeps(narrow)
    assert not CPU.keeps(ScaledNumbers(weight.numbers.short(), weight.scales, weight.groups))


def test_quantized_activations_are_rounded_to_even_as_numpy_does() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    weight = ScaledNumbers(
        torch.eye(32, dtype=torch.int8), torch.ones(32, 1), torch.zeros(32, dtype=torch.int64)
    )
    found = CPU.linear([weight])(x)[0, :4].numpy()
    assert np.array_equal(found, np.rint([127.0, 0.5, 1.5, -2.5]).astype(np.float32))
