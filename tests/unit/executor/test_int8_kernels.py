"""int8 products equal sums of integers exactly, at every size and at the extremes, for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch.nn import functional

from executor_service.backends.torch_backend.cpu.gemm.tile_int8 import (
    LARGEST_WEIGHT,
    largest_activation,
    put_tile,
)
from executor_service.backends.torch_backend.cpu.kernels import CpuInt8Kernels
from executor_service.backends.torch_backend.cpu.layers.linear_int8 import pack, unpack
from executor_service.backends.torch_backend.cpu.primitives.registers import (
    FEATURES,
    LANES,
    MAX_ROWS,
    VECTOR,
)

CPU = CpuInt8Kernels(2)
ROWS = [1, 2, 3, 4, 5, 6, 7, 13, 97, 203]
SHAPES = [(16, 8), (64, 33), (100, 64), (7, 5), (520, 72), (33, 1)]


@pytest.fixture(autouse=True, params=["helped", "alone"])
def _helpers(request: pytest.FixtureRequest) -> Iterator[None]:
    with CPU.step() if request.param == "helped" else nullcontext():
        yield


def reference(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """x W^T by way of int64 sums, rounded as the kernels round."""
    largest = np.float32(largest_activation(x.shape[1]))
    most = x.abs().amax(1, keepdim=True).numpy()
    rows, x_scales = np.rint(x.numpy() * (largest / most)), most / largest
    w_scales = weight.abs().amax(1, keepdim=True).numpy() / np.float32(LARGEST_WEIGHT)
    columns = np.rint(weight.numpy() / w_scales)
    sums = rows.astype(np.int64) @ columns.astype(np.int64).T
    assert np.abs(sums).max() < 2**31
    product: np.ndarray = sums.astype(np.float32) * (x_scales * w_scales.T)
    return product


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_equals_sums_of_integers_to_the_last_bit(n: int, k: int) -> None:
    torch.manual_seed(n)
    weight, bias = torch.randn(n, k), torch.randn(n)
    linear, biased = CPU.linear([weight[: n // 2], weight[n // 2 :]]), CPU.linear([weight], bias)
    for rows in ROWS:
        x, base = torch.randn(rows, k), torch.randn(rows, n)
        expected = torch.from_numpy(reference(x, weight))
        assert torch.equal(linear(x), expected)
        assert torch.equal(biased(x), bias + expected)
        added = base.clone()
        assert biased(x, add_to=added) is added
        assert torch.equal(added, (base + bias) + expected)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gated_equals_sums_of_integers(n: int, k: int) -> None:
    torch.manual_seed(n)
    gate, up = torch.randn(n, k), torch.randn(n, k)
    gated = CPU.gated(gate, up)
    for rows in ROWS:
        x = torch.randn(rows, k)
        expected = functional.silu(torch.from_numpy(reference(x, gate))) * torch.from_numpy(reference(x, up))
        torch.testing.assert_close(gated(x), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("k", [2, 133, 576, 1536, 12_288])
def test_no_sum_overflows_at_the_extremes(k: int) -> None:
    signs = torch.where(torch.randn(20, k) > 0, 1.0, -1.0)
    x = torch.cat([torch.ones(1, k), -torch.ones(1, k), signs]) * 3.0
    weight = torch.cat([torch.ones(1, k), -torch.ones(1, k), signs])
    assert k * LARGEST_WEIGHT * largest_activation(k) < 2**31
    assert torch.equal(CPU.linear([weight])(x), torch.from_numpy(reference(x, weight)))


def test_quantized_rows_come_within_the_rounding_of_fp32() -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(64, 576), torch.randn(9, 576)
    x[:, 3] *= 300  # an outlier, as real models have them
    linear = CPU.linear([weight])
    rounded = linear.rows(torch.arange(64))
    assert (rounded - weight).abs().max() <= weight.abs().amax() / (2 * LARGEST_WEIGHT) * 1.001
    step = x.abs().amax(1, keepdim=True) / largest_activation(576)
    assert ((linear(x) - x @ rounded.T).abs() <= 0.51 * step * rounded.abs().sum(1)).all()


def test_products_are_bitwise_the_same_for_any_number_of_rows_and_threads() -> None:
    torch.manual_seed(0)
    weight, up, x = torch.randn(200, 72), torch.randn(200, 72), torch.randn(211, 72)
    linear, gated = CPU.linear([weight])(x), CPU.gated(weight, up)(x)
    for kernels in (CPU, CpuInt8Kernels(1)):
        again, gated_again = kernels.linear([weight]), kernels.gated(weight, up)
        for rows in (1, 2, 3, 4, 5, 7, 8, 33, 97, 211):
            for first in (0, 211 - rows):
                here = slice(first, first + rows)
                assert torch.equal(again(x[here]), linear[here])
                assert torch.equal(gated_again(x[here]), gated[here])


def test_what_is_not_finite_stays_in_its_own_row() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(40, 33), torch.randn(6, 33)
    expected = CPU.linear([weight])(x)
    x[1, 5], x[3, 32], x[4, 0] = torch.nan, torch.inf, -torch.inf
    for out in (CPU.linear([weight])(x), CPU.gated(weight, weight)(x)):
        assert out[[1, 3, 4]].isnan().all()
        assert out[[0, 2, 5]].isfinite().all()
    assert torch.equal(CPU.linear([weight])(x)[[0, 2, 5]], expected[[0, 2, 5]])


def test_zeros_and_what_is_next_to_zero_give_zeros() -> None:
    weight, x = torch.randn(20, 8), torch.zeros(3, 8)
    x[1], x[2] = 1e-38, 1e-45
    assert not CPU.linear([weight])(x).any()
    assert not CPU.linear([weight * 0])(torch.randn(3, 8)).any()
    assert not CPU.linear([torch.full((20, 8), 1e-45)])(torch.randn(3, 8)).any()


def test_a_row_of_weights_that_is_not_finite_is_reported_as_nan() -> None:
    weight = torch.randn(20, 8)
    weight[3, 1], weight[17, 2] = torch.nan, torch.inf
    out = CPU.linear([weight])(torch.randn(4, 8))
    assert out[:, [3, 17]].isnan().all()
    assert out.isfinite().all(0).sum() == 18


def test_weights_next_to_zero_keep_their_bounds() -> None:
    weights, _ = unpack(pack(torch.tensor([[190.0, -190.0, 3.0, 128.0]]) * 1.4e-45))
    assert weights[0, :, 0].flatten().tolist()[:2] == [127, -127]
    assert weights.abs().max() <= LARGEST_WEIGHT


def test_packing_in_parts_loses_no_row() -> None:
    weight = torch.arange(1, 5001).float()[:, None] * torch.tensor([[127.0, -64.0, 32.0]])
    panels, scales = unpack(pack(weight))
    assert panels.shape == (313, 2, 16, 2)
    assert panels[:312].equal(panels[:1].expand(312, -1, -1, -1))
    assert panels[0, :, 5].tolist() == [[127, -64], [32, 0]]
    assert scales.flatten()[:5000].equal(torch.arange(1, 5001).float())


def test_avx2_multiplies_and_adds_a_vector_of_pairs_in_one_instruction() -> None:
    compiled: Any = njit(f"void({', '.join(['int64'] * 9)})")(put_tile.py_func)  # type: ignore[attr-defined]
    [assembly] = compiled.inspect_asm().values()
    if "+avx2" in FEATURES:
        vectors = sum(range(MAX_ROWS + 1)) * LANES // VECTOR  # of the tiles that are a panel wide, alone
        assert assembly.count("vpmaddwd") + assembly.count("vpdpwssd") >= vectors
        assert "vpmulld" not in assembly
