"""The formats of `quantized` on CUDA: rows are rounded, and sums of int8 scaled, in one Triton kernel each.

In plain torch these are a dozen launches for each linear layer, which would cost more than 8 bits save.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch import Launch
from executor_service.backends.torch_backend.quantized import MIN_MAGNITUDE, Format, Fp8, Int8, padded

_COLUMNS = 2048  # of a row at a time
_TO_NEAREST = tl.constexpr(12_582_912.0)  # 1.5 * 2^23: added and taken away, it rounds to even integers


@triton.jit(do_not_specialize=["rows"])  # it differs from step to step
def _round_kernel(
    x, out, scales, x_stride, rows, k, filled, least, largest,
    digits: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Program (row): its largest magnitude, then its numbers; rows and columns beyond are zeros.

    One digit is a number of `out`, two are integers; the low ones come below all high ones.
    """
    row = tl.program_id(0)
    line = x + row.to(tl.int64) * x_stride
    column = tl.arange(0, columns)
    known = tl.where(row < rows, k, 0)
    # Magnitudes are ordered as their bits are, NaN above all: no comparison loses one.
    most = tl.full([columns], least, tl.float32).to(tl.int32, bitcast=True)
    for first in range(0, k, columns):
        numbers = tl.load(line + first + column, mask=first + column < known, other=0.0).to(tl.float32)
        most = tl.maximum(most, numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = tl.div_rn(tl.max(most, 0).to(tl.float32, bitcast=True), largest)
    tl.store(scales + row, scale)
    for first in range(0, filled, columns):
        numbers = tl.load(line + first + column, mask=first + column < known, other=0.0).to(tl.float32)
        rounded = tl.div_rn(numbers, scale)
        place, mask = out + row.to(tl.int64) * filled + first + column, first + column < filled
        if digits == 2:
            rounded = tl.where(rounded == rounded, rounded, 0.0) + _TO_NEAREST - _TO_NEAREST
            whole = rounded.to(tl.int32)
            high = (whole + 128) >> 8
            low_place = place + tl.num_programs(0).to(tl.int64) * filled
            tl.store(low_place, (whole - 256 * high).to(out.dtype.element_ty), mask=mask)
            tl.store(place, high.to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(place, rounded.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _scale_kernel(sums, out, x_scales, weight_scales, n, columns: tl.constexpr):  # fmt: skip
    """Program (row, part of its columns): puts the digits' sums together, then scales them.

    256 times a number is exact: whether a multiplication and an addition become one changes nothing.
    """
    row, column = tl.program_id(0), tl.program_id(1) * columns + tl.arange(0, columns)
    place, mask = row.to(tl.int64) * n + column, column < n
    high = tl.load(sums + place, mask=mask).to(tl.float32)
    low = tl.load(sums + tl.num_programs(0).to(tl.int64) * n + place, mask=mask).to(tl.float32)
    wide = (256 * high + low) * tl.load(x_scales + row)
    wide *= tl.load(weight_scales + column, mask=mask)
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=mask)


def round_launch(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, form: Format) -> Launch:
    """x [rows, k], lines contiguous, to out [digits * m, k or more] and scales fp32 [m, 1], m >= rows."""
    return Launch(
        _round_kernel,
        (scales.shape[0], 1, 1),
        {
            "x": x, "out": out, "scales": scales, "x_stride": x.stride(0), "rows": x.shape[0],
            "k": x.shape[1], "filled": out.shape[1], "least": MIN_MAGNITUDE,
            "largest": form.largest_activation,
        },
        {"digits": form.digits, "columns": _COLUMNS},
        warps=8,
        stages=1,
    )  # fmt: skip


def scale_launch(
    sums: torch.Tensor, out: torch.Tensor, x_scales: torch.Tensor, weight_scales: torch.Tensor
) -> Launch:
    """out [rows, n] = sums int32 [2 * rows, n], high digits first, put together and scaled; contiguous.

    x_scales fp32 [rows, 1], weight_scales fp32 [1, n].
    """
    rows, n = out.shape
    return Launch(
        _scale_kernel,
        (rows, -(-n // _COLUMNS), 1),
        {"sums": sums, "out": out, "x_scales": x_scales, "weight_scales": weight_scales, "n": n},
        {"columns": _COLUMNS},
        warps=8,
        stages=1,
    )


def _round(x: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, k = padded(x, form)
    out = torch.empty(form.digits * rows, k, dtype=form.dtype, device=x.device)
    scales = torch.empty(rows, 1, device=x.device)
    round_launch(x, out, scales, form).run()
    return out, scales


class TritonInt8(Int8):
    """`Int8` with three kernels a product."""

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _round(x, self)

    def product(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
    ) -> torch.Tensor:
        """As `Format.product`, in bf16."""
        sums = self.sums(x, weight)
        out = torch.empty(len(x_scales), len(weight), dtype=torch.bfloat16, device=x.device)
        scale_launch(sums, out, x_scales, weight_scales).run()
        return out


class TritonFp8(Fp8):
    """`Fp8` with two."""

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _round(x, self)


def fused(form: Format) -> Format:
    """The same format in these kernels."""
    return TritonFp8() if form.dtype.is_floating_point else TritonInt8()
