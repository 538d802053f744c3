"""RMSNorm and the product of SwiGLU in Triton: one launch each, instead of eight and two in plain torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch import Launch, power_of_two

_COLUMNS = 1024  # per program of `swiglu`


@triton.jit
def _norm_kernel(x, weight, out, eps, width: tl.constexpr, columns: tl.constexpr):
    """Program (row): norm one row."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, columns)
    mask = d < width
    wide = tl.load(x + row * width + d, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = tl.load(weight + d, mask=mask, other=0.0) * (wide * scale)
    tl.store(out + row * width + d, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_kernel(both, out, width: tl.constexpr, columns: tl.constexpr):
    """Program (row, block of columns): silu(gate) * up of the columns."""
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns + tl.arange(0, columns)
    mask = d < width
    gate = tl.load(both + row * (2 * width) + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * (2 * width) + width + d, mask=mask, other=0.0).to(tl.float32)
    # silu is rounded before it is multiplied, as torch does in two steps.
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + d, (silu * up).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each row of x [rows, width], computed in fp32, in x's dtype; weight fp32 [width]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    norm_launch(x, weight, out, eps).run()
    return out


def swiglu(both: torch.Tensor) -> torch.Tensor:
    """silu of the left half of each row times its right half: [rows, 2 width] to [rows, width]."""
    out = both.new_empty(both.shape[0], both.shape[1] // 2)
    swiglu_launch(both.contiguous(), out).run()
    return out


def norm_launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> Launch:
    """The launch of `rms_norm`; x contiguous."""
    width = x.shape[1]
    return Launch(
        _norm_kernel,
        (x.shape[0], 1, 1),
        {"x": x, "weight": weight, "out": out, "eps": eps},
        {"width": width, "columns": power_of_two(width)},
        warps=8,
        stages=1,
    )


def swiglu_launch(both: torch.Tensor, out: torch.Tensor) -> Launch:
    """The launch of `swiglu`; both contiguous."""
    width = out.shape[1]
    return Launch(
        _swiglu_kernel,
        (out.shape[0], -(-width // _COLUMNS), 1),
        {"both": both, "out": out},
        {"width": width, "columns": _COLUMNS},
        warps=4,
        stages=1,
    )
