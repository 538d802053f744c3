"""RMSNorm and the product of gated MLPs in Triton: one launch each, not eight and two as in plain torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch, power_of_two
from executor_service.backends.torch_backend.files.architecture.activation import CLAMP, SLOPE, Activation

_COLUMNS = 1024  # per program of `gated`
_GELU, _CLAMPED = tl.constexpr(int(Activation.GELU)), tl.constexpr(int(Activation.CLAMPED))
_CLAMP, _SLOPE = tl.constexpr(CLAMP), tl.constexpr(SLOPE)
_GELU_1, _GELU_3 = tl.constexpr(1.5957691216057308), tl.constexpr(0.07135481282629013)


@triton.jit
def _norm_kernel(
    x, weight, out, eps, x_stride, width: tl.constexpr, columns: tl.constexpr, add: tl.constexpr
):  # fmt: skip
    """Program (row): norm one row, and with `add` add it to `out`."""
    begin_kernel()
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, columns)
    mask = d < width
    wide = tl.load(x + row * x_stride + d, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    # Rounded before it is added, as torch does in two steps.
    normed = (tl.load(weight + d, mask=mask, other=0.0) * (wide * scale)).to(out.dtype.element_ty)
    place = out + row * width + d
    if add:
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        normed = (before + normed.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(place, normed, mask=mask)


@triton.jit
def joined(gate, up, activation: tl.constexpr, dtype: tl.constexpr):
    """activation(gate) * up, of fp32, in `dtype`."""
    turn = gate
    if activation == _GELU:
        turn = gate * (_GELU_1 + _GELU_3 * gate * gate)
    elif activation == _CLAMPED:
        gate = tl.where(gate > _CLAMP, _CLAMP, gate)  # keeps NaN, as minimum need not
        up = tl.where(up > _CLAMP, _CLAMP, tl.where(up < -_CLAMP, -_CLAMP, up)) + 1.0
        turn = gate * _SLOPE
    # It is rounded before it is multiplied, as torch does in two steps.
    opened = (gate / (1.0 + tl.exp(-turn))).to(dtype).to(tl.float32)
    return (opened * up).to(dtype)


@triton.jit
def _gated_kernel(both, out, width: tl.constexpr, columns: tl.constexpr, activation: tl.constexpr):
    """Program (row, block of columns): activation(gate) * up of the columns."""
    begin_kernel()
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns + tl.arange(0, columns)
    mask = d < width
    gate = tl.load(both + row * (2 * width) + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * (2 * width) + width + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + d, joined(gate, up, activation, out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSNorm of each row of x [rows, width], computed in fp32, in x's dtype; weight fp32 [width].

    x has contiguous columns; with `add_to`, contiguous, the result is added to that, in place.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if add_to is None else add_to
    norm_launch(x, weight, out, eps, add=add_to is not None).run()
    return out


def gated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of the left half of each row times its right half: [rows, 2 width] to [rows, width]."""
    out = both.new_empty(both.shape[0], both.shape[1] // 2)
    gated_launch(both.contiguous(), out, activation).run()
    return out


def norm_launch(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, *, add: bool = False
) -> Launch:
    """The launch of `rms_norm`."""
    width = x.shape[1]
    return Launch(
        _norm_kernel,
        (x.shape[0], 1, 1),
        {"x": x, "weight": weight, "out": out, "eps": eps, "x_stride": x.stride(0)},
        {"width": width, "columns": power_of_two(width), "add": int(add)},
        warps=8,
        stages=1,
    )


def gated_launch(both: torch.Tensor, out: torch.Tensor, activation: Activation) -> Launch:
    """The launch of `gated`; both contiguous."""
    width = out.shape[1]
    return Launch(
        _gated_kernel,
        (out.shape[0], -(-width // _COLUMNS), 1),
        {"both": both, "out": out},
        {"width": width, "columns": _COLUMNS, "activation": int(activation)},
        warps=4,
        stages=1,
    )
