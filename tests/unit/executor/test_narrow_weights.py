"""Products over weights of 16 bits on CPU: those of the same numbers in fp32, to the last bit."""

from __future__ import annotations

import pytest
import torch

from executor_service.backends.torch_backend.cpu.kernels import CpuKernels
from executor_service.backends.torch_backend.cpu.primitives.registers import CONVERTS_FP16

CPU = CpuKernels(2)
NARROW = [torch.bfloat16, *([torch.float16] if CONVERTS_FP16 else [])]


def drawn(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all magnitudes that are finite in the dtype, denormal ones too."""
    largest = torch.finfo(dtype).max
    weight = (torch.randn(n, k) * 10.0 ** torch.randint(-9, 2, (n, k))).clamp(-largest, largest).to(dtype)
    weight[0, 0], weight[-1, -1] = torch.finfo(dtype).smallest_normal / 2, 0.0
    return weight


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("n", "k"), [(16, 8), (100, 33), (520, 72), (7, 5)])
def test_linear_layers_have_the_bits_of_fp32(n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    weight, bias = drawn(n, k, dtype), torch.randn(n)
    narrow, wide = CPU.linear([weight], bias), CPU.linear([weight.float()], bias)
    for rows in (1, 2, 3, 5, 7, 13, 100):
        x, base = torch.randn(rows, k), torch.randn(rows, n)
        assert torch.equal(narrow(x), wide(x))
        assert torch.equal(narrow(x, add_to=base.clone()), wide(x, add_to=base.clone()))
    ids = torch.randint(n, (9,))
    assert torch.equal(narrow.rows(ids), weight[ids].float())
    assert 2 * narrow.bytes() == wide.bytes()


@pytest.mark.parametrize("dtype", NARROW)
def test_gated_layers_have_the_bits_of_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate, up = drawn(88, 33, dtype), drawn(88, 33, dtype)
    narrow, wide = CPU.gated(gate, up), CPU.gated(gate.float(), up.float())
    for rows in (1, 3, 7, 100):
        x = torch.randn(rows, 33)
        assert torch.equal(narrow(x), wide(x))
    assert 2 * narrow.bytes() == wide.bytes()


def test_parts_of_different_dtypes_and_wider_numbers_become_fp32() -> None:
    torch.manual_seed(2)
    parts = [torch.randn(32, 24).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    x = torch.randn(5, 24)
    assert torch.equal(CPU.linear(parts)(x), CPU.linear([part.float() for part in parts])(x))
    expected = CPU.gated(parts[0].float(), parts[2].float())(x)
    assert torch.equal(CPU.gated(parts[0], parts[2])(x), expected)
