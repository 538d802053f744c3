"""The sum of what several ranks have of the same numbers, in one Triton kernel: see `Kernels.sum_parts`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch

_TILE = 1024  # numbers of a program


@triton.jit(do_not_specialize=("count",))
def _sum_kernel(parts, out, count, ranks: tl.constexpr, add: tl.constexpr, tile: tl.constexpr):
    """Program (tile of numbers): add them up, and with `add` add the sum to `out`."""
    begin_kernel()
    index = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    live = index < count
    total = tl.load(parts + index, mask=live, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, ranks):
        parts += count
        total += tl.load(parts + index, mask=live, other=0.0).to(tl.float32)
    # Rounded before it is added, as torch does in two steps.
    total = total.to(out.dtype.element_ty)
    if add:
        before = tl.load(out + index, mask=live, other=0.0).to(tl.float32)
        total = (before + total.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + index, total, mask=live)


def sum_parts(parts: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of parts [ranks, ...]; parts and `add_to` are contiguous."""
    out = torch.empty_like(parts[0]) if add_to is None else add_to
    sum_launch(parts, out, add=add_to is not None).run()
    return out


def sum_launch(parts: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> Launch:
    """The launch of `sum_parts`."""
    count = out.numel()
    return Launch(
        _sum_kernel,
        (-(-count // _TILE), 1, 1),
        {"parts": parts, "out": out, "count": count},
        {"ranks": len(parts), "add": int(add), "tile": _TILE},
        warps=4,
        stages=1,
    )
