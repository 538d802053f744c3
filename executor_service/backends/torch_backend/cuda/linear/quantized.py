"""The formats of `ops/quantized.py` on CUDA: Triton kernels round rows, scale int8 sums, multiply few rows.

In plain torch these are a dozen launches for each linear layer, which cost more than 8-bit weights save.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import MAX_ROWS, few_scaled_rows_launch
from executor_service.backends.torch_backend.ops.quantized import MIN_MAGNITUDE, Format, Fp8, Int8, padded

_COLUMNS = 2048  # of a row, read at once
_TO_NEAREST = tl.constexpr(
    12_582_912.0
)  # 1.5 * 2^23: adding and subtracting it rounds to integers, ties to even


@triton.jit(do_not_specialize=["rows"])  # it differs from step to step
def _round_kernel(
    x, out, scales, x_stride, rows, k, filled, min_magnitude, largest,
    digits: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Program (row): the scale from the row's largest magnitude, then its rounded numbers.

    `filled` columns are written, with zeros from column k on, and in rows from `rows` on. With one digit a
    number is stored as `out`'s dtype, with two as an integer, whose low digits follow the high digits of all
    rows.
    """
    begin_kernel()
    row = tl.program_id(0)
    line = x + row.to(tl.int64) * x_stride
    column = tl.arange(0, columns)
    known = tl.where(row < rows, k, 0)
    # Magnitudes compare as their bits do, with NaN above all others, so that a NaN is never lost.
    magnitudes = tl.full([columns], min_magnitude, tl.float32).to(tl.int32, bitcast=True)
    for first in range(0, k, columns):
        numbers = tl.load(line + first + column, mask=first + column < known, other=0.0).to(tl.float32)
        magnitudes = tl.maximum(magnitudes, numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = tl.div_rn(tl.max(magnitudes, 0).to(tl.float32, bitcast=True), largest)
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
    """Program (row, block of columns): 256 * the sums of high digits + those of low digits, scaled.

    The product with 256 is exact, so a fused multiply-add gives the same result.
    """
    begin_kernel()
    row, column = tl.program_id(0), tl.program_id(1) * columns + tl.arange(0, columns)
    place, mask = row.to(tl.int64) * n + column, column < n
    high = tl.load(sums + place, mask=mask).to(tl.float32)
    low = tl.load(sums + tl.num_programs(0).to(tl.int64) * n + place, mask=mask).to(tl.float32)
    wide = (256 * high + low) * tl.load(x_scales + row)
    wide *= tl.load(weight_scales + column, mask=mask)
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=mask)


def round_launch(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, form: Format) -> Launch:
    """The launch that rounds x [rows, k], with contiguous columns.

    out [digits * m, k or more], scales fp32 [m, 1], m >= rows.
    """
    return Launch(
        _round_kernel,
        (scales.shape[0], 1, 1),
        {
            "x": x, "out": out, "scales": scales, "x_stride": x.stride(0), "rows": x.shape[0],
            "k": x.shape[1], "filled": out.shape[1], "min_magnitude": MIN_MAGNITUDE,
            "largest": form.largest_activation,
        },
        {"digits": form.digits, "columns": _COLUMNS},
        warps=8,
        stages=1,
    )  # fmt: skip


def scale_launch(
    sums: torch.Tensor, out: torch.Tensor, x_scales: torch.Tensor, weight_scales: torch.Tensor
) -> Launch:
    """The launch that combines and scales sums int32 [2 * rows, n], high digits first, to out [rows, n].

    x_scales fp32 [rows, 1], weight_scales fp32 [1, n]; all contiguous.
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
    if len(x) <= MAX_ROWS:
        rows = len(x)
    out = torch.empty(form.digits * rows, k, dtype=form.dtype, device=x.device)
    scales = torch.empty(rows, 1, device=x.device)
    round_launch(x, out, scales, form).run()
    return out, scales


def _few_rows(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    out = torch.empty(len(x_scales), len(weight), dtype=torch.bfloat16, device=x.device)
    few_scaled_rows_launch(x, x_scales, weight, weight_scales, out).run()
    return out


class TritonInt8(Int8):
    """`Int8` in three launches per product: round, multiply, scale; of few rows in two."""

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _round(x, self)

    def product(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
    ) -> torch.Tensor:
        """As `Format.product`, in bf16."""
        if len(x_scales) <= MAX_ROWS:
            return _few_rows(x, x_scales, weight, weight_scales)
        sums = self.sums(x, weight)
        out = torch.empty(len(x_scales), len(weight), dtype=torch.bfloat16, device=x.device)
        scale_launch(sums, out, x_scales, weight_scales).run()
        return out


class TritonFp8(Fp8):
    """`Fp8` in two launches per product: round, multiply."""

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _round(x, self)

    def product(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
    ) -> torch.Tensor:
        """As `Format.product`, in bf16."""
        if len(x_scales) <= MAX_ROWS:
            return _few_rows(x, x_scales, weight, weight_scales)
        return super().product(x, x_scales, weight, weight_scales)


def fused(form: Format) -> Format:
    """The same format with these kernels."""
    return TritonFp8() if form.dtype.is_floating_point else TritonInt8()
