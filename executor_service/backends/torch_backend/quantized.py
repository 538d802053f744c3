"""Linear layers with weights of 8 bits, int8 or fp8 (e4m3), through torch's own products of 8 bits.

A weight has a scale for each output channel, found when it is loaded; an input has one for each row, found as
it comes: the largest magnitude over the largest number of the format. Inputs of fp8 have 8 bits, those of
int8 16, as on CPU: two digits of 8, rows of one product. All else stays in the input's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from executor_service.backends.base import ModelError

ALIGNMENT = 16
"""Inputs and output channels are filled up with zeros to a multiple of this.

`torch._scaled_mm` asks for it on CUDA and `torch._int_mm` for 8 (ATen: `_scaled_mm_out_cuda`,
`_int_mm_out_cuda`); lines of int8 begin at multiples of 16 bytes with it, as tensor core kernels want.
"""
_MIN_INT8_ROWS = 16
"""`torch._int_mm` refuses fewer than 17 on CUDA (ATen: `_int_mm_out_cuda`); pytorch#178469 fills up to 32.

With two digits these are 32, so up to here the second costs nothing.
"""
MIN_FP8_CAPABILITY = (8, 9)
"""The compute capability that ATen's `_scaled_mm_out_cuda` asks for; cuBLAS has it from 9.0 on."""
_ROUNDED_AT_ONCE = 4096  # channels: rounding a weight takes little memory beside the result
MIN_MAGNITUDE = 1e-30  # a row of zeros has a scale too


class Format(Protocol):
    """Numbers of 8 bits and their product."""

    dtype: torch.dtype  # of weights and digits
    largest_weight: float  # magnitude
    largest_activation: float
    digits: int  # of an activation
    max_inputs: int  # of a sum
    min_rows: int  # of x in a product

    def check(self, device: torch.device) -> None:
        """Raises ModelError where the product does not exist."""

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, k] as [digits * rows, k], all rows' high digits first, and its scales, fp32 [rows, 1].

        Rows and k are filled up as the product needs. The scale of a row that is not finite
        is not finite either, whatever its numbers became.
        """

    def product(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
    ) -> torch.Tensor:
        """x W^T, scaled, [rows, n] in fp32 or bf16.

        x [digits * rows, k], its scales fp32 [rows, 1]; weight [n, k], its scales fp32 [1, n].
        """


class Int8:
    """Weights of -127 to 127, and activations of 256 high + low, with digits of -128 to 127.

    The sums of either digit are int32 and exact in any order. They are rounded to fp32, then their weighted
    sum is, then its products with the two scales: each number by itself, so that **a row's result does not
    depend on its batch**. Next to the sum of its magnitudes a weighted sum is exact to 2^-22.
    """

    dtype = torch.int8
    largest_weight = 127.0
    largest_activation = 32_639.0  # 256 * 127 + 127
    digits = 2
    max_inputs = (2**31 - 1) // 128**2  # what is not finite may become -128
    min_rows = _MIN_INT8_ROWS

    def check(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ModelError(f"dtype int8 runs on cpu and cuda only, not on {str(device)!r}")

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded, scales = round_rows(_filled(x, self), torch.int16, self.largest_activation)
        high = (rounded + 128) >> 8
        return torch.cat([high, rounded - 256 * high]).to(torch.int8), scales

    def sums(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [rows, k] W^T [k, n], int32."""
        return torch._int_mm(x, weight.T)

    def product(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
    ) -> torch.Tensor:
        """As `Format.product`, in fp32."""
        high, low = self.sums(x, weight).float().chunk(2)
        return (256 * high + low) * x_scales * weight_scales


class Fp8:
    """e4m3: four bits of exponent, three of mantissa. Shapes may change the order and precision of sums."""

    dtype = torch.float8_e4m3fn
    largest_weight = largest_activation = 448.0
    digits = 1
    max_inputs = 2**31 - 1
    min_rows = 1

    def check(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ModelError(f"dtype fp8 runs on cpu and cuda only, not on {str(device)!r}")
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < MIN_FP8_CAPABILITY:
            have, need = (f"{major}.{minor}" for major, minor in (found, MIN_FP8_CAPABILITY))
            raise ModelError(f"dtype fp8 needs compute capability {need}; {str(device)!r} has {have}")

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return round_rows(_filled(x, self), self.dtype, self.largest_activation)

    def product(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
    ) -> torch.Tensor:
        """As `Format.product`, in bf16, the one dtype that all kernels of `_scaled_mm` support."""
        return torch._scaled_mm(x, weight.T, x_scales, weight_scales, out_dtype=torch.bfloat16)


def round_rows(x: torch.Tensor, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, k] as dtype, with magnitudes up to `largest`, and its scales, fp32 [rows, 1]."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min_(MIN_MAGNITUDE) / largest
    wide = wide / scales
    return (wide if dtype.is_floating_point else wide.round_()).to(dtype), scales


def _filled(x: torch.Tensor, form: Format) -> torch.Tensor:
    rows, k = padded(x, form)
    return functional.pad(x, (0, k - x.shape[1], 0, rows - len(x)))


def padded(x: torch.Tensor, form: Format) -> tuple[int, int]:
    """The size that x is filled up to."""
    rows, k = x.shape
    return max(rows, form.min_rows), k + -k % ALIGNMENT


class QuantizedLinear:
    """x W^T + b, with W [n, k] given as parts that follow each other in n."""

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        form: Format,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raises ModelError when a sum could overflow."""
        self._n, self._k = sum(part.shape[0] for part in parts), parts[0].shape[1]
        if self._k > form.max_inputs:
            raise ModelError(f"{self._k} inputs of a linear layer are too many for {form.dtype}")
        self.form, self._dtype = form, dtype
        self._weight = torch.zeros(
            self._n + -self._n % ALIGNMENT, self._k + -self._k % ALIGNMENT, dtype=form.dtype, device=device
        )
        self._scales = torch.zeros(1, len(self._weight), device=device)
        self._bias = None if bias is None else bias.to(device=device, dtype=dtype)
        first = 0
        for piece in (piece for part in parts for piece in torch.split(part, _ROUNDED_AT_ONCE)):
            end = first + len(piece)
            rounded, scales = round_rows(piece.to(device), form.dtype, form.largest_weight)
            self._weight[first:end, : self._k] = rounded
            self._scales[0, first:end] = scales[:, 0]
            first = end

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, k] to [rows, n]; with `add_to` [rows, n] the result is added to it, in place."""
        out = self.product(*self.form.round(x))[: len(x)]
        if self._bias is not None:
            out = out + self._bias
        return out.to(self._dtype).contiguous() if add_to is None else add_to.add_(out)

    def product(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """x W^T of what `Format.round` gives, [its rows, n] in what the format's product gives."""
        return self.form.product(x, scales, self._weight, self._scales)[:, : self._n]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W as they were rounded, [ids, k]."""
        return (self._weight[ids, : self._k].float() * self._scales[0, ids, None]).to(self._dtype)

    def bytes(self) -> int:
        """Memory of the weights."""
        return self._weight.nbytes + self._scales.nbytes
