"""Linear layers with 8-bit weights, int8 or fp8 (e4m3), computed by torch's 8-bit matrix products.

A weight matrix has a scale for each output channel, computed at loading; an input has one for each row,
computed when it arrives. A scale is the largest magnitude divided by the largest number of the format. fp8
inputs have 8 bits. int8 inputs have 16, as on CPU: two digits of 8 bits, which are two rows of one product.
Everything else stays in the input's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.nn import functional

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight
from executor_service.backends.torch_backend.ops.low_rank import LinearChange

ALIGNMENT = 16
"""The numbers of inputs and output channels are padded with zeros to a multiple of this.

On CUDA `torch._scaled_mm` requires 16 and `torch._int_mm` 8 (ATen: `_scaled_mm_out_cuda`,
`_int_mm_out_cuda`). With 16, int8 rows also begin at multiples of 16 bytes, which tensor core kernels need to
be fast.
"""
_MIN_INT8_ROWS = 16
"""Rows are padded to at least 16, which are 32 with two digits: up to there the second digit costs nothing.

`torch._int_mm` refuses fewer than 17 on CUDA (ATen: `_int_mm_out_cuda`); pytorch#178469 pads to 32.
"""
MIN_FP8_CAPABILITY = (8, 9)
"""The compute capability that ATen's `_scaled_mm_out_cuda` requires; cuBLAS has such products from 9.0 on.

Instructions that convert from and to e4m3 exist from the same one on (PTX ISA: `cvt`).
"""
_ROUNDED_AT_ONCE = 4096  # output channels: bounds the memory that rounding a weight matrix takes
MIN_MAGNITUDE = 1e-30  # so that a row of zeros has a scale above 0


class Format(Protocol):
    """An 8-bit number format and its matrix product."""

    dtype: torch.dtype  # of weights and digits
    largest_weight: float  # magnitude of a rounded weight
    largest_activation: float  # magnitude of a rounded activation
    digits: int  # per activation
    max_inputs: int  # per output channel, so that no sum overflows
    min_rows: int  # of a product's x, to which it is padded

    def check(self, device: torch.device) -> None:
        """Raises ModelError for a device on which the product is not available."""

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Round x [rows, k] to [digits * rows, k], all rows' high digits first, and scales fp32 [rows, 1].

        Rows and k are padded as the product needs. A row with a NaN or infinity has a scale that is not
        finite; its numbers are then undefined.
        """

    def product(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
    ) -> torch.Tensor:
        """The scaled product x W^T, [rows, n] in fp32 or bf16.

        x [digits * rows, k], its scales fp32 [rows, 1]; weight [n, k], its scales fp32 [1, n].
        """


class Int8:
    """Weights from -127 to 127; activations are 256 high + low, with digits from -128 to 127.

    The sums of each digit are int32, hence exact in any order. They are rounded to fp32, and so are 256 high
    + low and its products with the two scales: each number by itself, so that **a row's result does not
    depend on its batch**. The error of 256 high + low is at most 2^-22 of the sum of its terms' magnitudes.
    """

    dtype = torch.int8
    largest_weight = 127.0
    largest_activation = 32_639.0  # 256 * 127 + 127
    digits = 2
    max_inputs = (2**31 - 1) // 128**2  # a number that is not finite can become -128
    min_rows = _MIN_INT8_ROWS

    def check(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ModelError(f"dtype int8 runs on cpu and cuda only, not on {str(device)!r}")

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded, scales = round_rows(_padded_with_zeros(x, self), torch.int16, self.largest_activation)
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
    """e4m3: four bits of exponent, three of mantissa. Order and precision of sums may depend on shapes."""

    dtype = torch.float8_e4m3fn
    largest_weight = largest_activation = 448.0
    digits = 1
    max_inputs = 2**31 - 1
    min_rows = 1

    def check(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ModelError(f"dtype fp8 runs on cpu and cuda only, not on {str(device)!r}")
        if device.type == "cuda":
            check_fp8("dtype fp8", device)

    def round(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return round_rows(_padded_with_zeros(x, self), self.dtype, self.largest_activation)

    def product(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
    ) -> torch.Tensor:
        """As `Format.product`, in bf16, the one dtype that all kernels of `_scaled_mm` support."""
        return torch._scaled_mm(x, weight.T, x_scales, weight_scales, out_dtype=torch.bfloat16)


def check_fp8(what: str, device: torch.device) -> None:
    """Raises ModelError, which names `what`, for a CUDA device that does not convert fp8."""
    check_capability(what, device, MIN_FP8_CAPABILITY)


def round_rows(x: torch.Tensor, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, k] / scales as dtype, with magnitudes up to `largest`, and the scales, fp32 [rows, 1]."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min_(MIN_MAGNITUDE) / largest
    wide = wide / scales
    return (wide if dtype.is_floating_point else wide.round_()).to(dtype), scales


def _padded_with_zeros(x: torch.Tensor, form: Format) -> torch.Tensor:
    rows, k = padded(x, form)
    return functional.pad(x, (0, k - x.shape[1], 0, rows - len(x)))


def padded(x: torch.Tensor, form: Format) -> tuple[int, int]:
    """Rows and columns of x after padding."""
    rows, k = x.shape
    return max(rows, form.min_rows), k + -k % ALIGNMENT


def _rounded(part: Weight, form: Format, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some rows after the other: numbers in the form's dtype [rows, k], and their scales, fp32 [rows, 1]."""
    if isinstance(part, ScaledNumbers):
        yield part.numbers, part.scales
        return
    for piece in torch.split(part, _ROUNDED_AT_ONCE):
        yield round_rows(piece.to(device), form.dtype, form.largest_weight)


class QuantizedLinear:
    """x W^T + b, with W [n, k] given as parts that are concatenated along n."""

    def __init__(
        self,
        parts: Sequence[Weight],
        bias: torch.Tensor | None,
        form: Format,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Parts that have numbers in the form's dtype, and a scale for each row, keep both.

        Raises ModelError when a sum could overflow.
        """
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
        for rounded, scales in (one for part in parts for one in _rounded(part, form, device)):
            end = first + len(rounded)
            self._weight[first:end, : self._k] = rounded
            self._scales[0, first:end] = scales[:, 0]
            first = end

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, change: LinearChange | None = None
    ) -> torch.Tensor:
        """[rows, k] to [rows, n]; with `add_to` [rows, n] the result is added to it, in place."""
        out = self.product(*self.form.round(x))[: len(x)]
        if self._bias is not None:
            out = out + self._bias
        if change is not None:
            change.add(x, out)  # of x as it is, not as it was rounded
        return out.to(self._dtype).contiguous() if add_to is None else add_to.add_(out)

    def product(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """x W^T of results of `Format.round`, [rows, n] in the dtype of `Format.product`."""
        return self.form.product(x, scales, self._weight, self._scales)[:, : self._n]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the rounded W, dequantized, [ids, k]."""
        return (self._weight[ids, : self._k].float() * self._scales[0, ids, None]).to(self._dtype)

    def bytes(self) -> int:
        """Bytes of the weights and scales."""
        return self._weight.nbytes + self._scales.nbytes


def check_capability(what: str, device: torch.device, needed: tuple[int, int]) -> None:
    """Raises ModelError, which names `what`, for a CUDA device of a lower compute capability."""
    if (found := torch.cuda.get_device_capability(device)) < needed:
        have, need = (f"{major}.{minor}" for major, minor in (found, needed))
        raise ModelError(f"{what} needs compute capability {need}; {str(device)!r} has {have}")
