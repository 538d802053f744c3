"""Rounding and scaling in Triton, interpreted, give what plain torch does to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_service.backends.torch_backend.cuda.kernels import CudaKernels
from executor_service.backends.torch_backend.cuda.linear.quantized import fused, scale_launch
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import MAX_ROWS
from executor_service.backends.torch_backend.ops.kernels import PlainKernels
from executor_service.backends.torch_backend.ops.quantized import Format, Fp8, Int8

CPU = torch.device("cpu")

every_format = pytest.mark.parametrize("form", [Int8(), Fp8()], ids=lambda form: type(form).__name__)


@every_format
@pytest.mark.parametrize(
    ("rows", "k", "dtype"),
    [(1, 5, torch.float32), (3, 2049, torch.bfloat16), (33, 64, torch.bfloat16), (40, 16, torch.float32)],
)
def test_rows_are_rounded_as_in_plain_torch(form: Format, rows: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * k).to(dtype)[:, :k]  # lines lie apart
    x[0, 0] *= 300
    x[-1, 1:] = 0
    (ours, our_scales), (theirs, their_scales) = fused(form).round(x), form.round(x)
    padded = rows if rows <= MAX_ROWS else len(their_scales)  # the product of few rows takes them as they are
    assert torch.equal(our_scales, their_scales[:padded])
    digits = theirs.view(torch.uint8).unflatten(0, (form.digits, -1))[:, :padded]
    assert torch.equal(ours.view(torch.uint8), digits.flatten(0, 1))


def test_every_number_of_16_bits_has_the_same_digits() -> None:
    most = 32_639
    x = torch.full((16, 4081), float(most))
    x[:, 1:] = torch.arange(-most, most + 2).clamp(max=most).view(16, 4080)
    (ours, scales), (theirs, _) = fused(Int8()).round(x), Int8().round(x)
    assert (scales == 1).all()
    assert torch.equal(ours, theirs)


@every_format
def test_what_is_not_finite_is_in_its_scale(form: Format) -> None:
    x = torch.randn(5, 40)
    x[1, 3], x[2, 39], x[3, 0], x[4] = torch.nan, torch.inf, -torch.inf, 0.0
    with np.errstate(invalid="ignore"):  # inf / inf
        _, scales = fused(form).round(x)
    assert scales[:5].isfinite().flatten().tolist() == [True, False, False, False, True]


def test_sums_are_put_together_and_scaled_as_in_plain_torch() -> None:
    torch.manual_seed(1)
    sums = torch.randint(-(2**31), 2**31 - 1, (6, 2064), dtype=torch.int32)
    scales, weight_scales, out = torch.rand(3, 1), torch.rand(1, 2064), torch.empty(3, 2064)
    scale_launch(sums, out, scales, weight_scales).run()
    assert torch.equal(out, (256 * sums[:3].float() + sums[3:].float()) * scales * weight_scales)


@every_format
def test_layers_equal_those_of_plain_torch(form: Format) -> None:
    torch.manual_seed(2)
    n, k = 19, 40
    weight, up, bias, x = torch.randn(n, k), torch.randn(n, k), torch.randn(n), torch.randn(5, k).bfloat16()
    ours, theirs = (kind(CPU, torch.bfloat16, form) for kind in (CudaKernels, PlainKernels))
    assert torch.equal(ours.gated(weight, up)(x), theirs.gated(weight, up)(x))
    base = torch.randn(5, n).bfloat16()
    added = [kernels.linear([weight], bias)(x, add_to=base.clone()) for kernels in (ours, theirs)]
    torch.testing.assert_close(*added, atol=0.3, rtol=0.02)  # rounded to bf16 before, or after
