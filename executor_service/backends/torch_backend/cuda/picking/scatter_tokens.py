"""Tokens that were picked again, to the step's picks, in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch.dependent_launch import begin_kernel
from executor_service.backends.torch_backend.cuda.launch.launch import Launch

_TILE = 256  # tokens of a program


@triton.jit(do_not_specialize=("picks", "found", "outputs", "count"))
def _publish_kernel(picks, found, outputs, count, tile: tl.constexpr):
    """Program (tile of tokens): store each token."""
    begin_kernel()
    index = tl.program_id(0) * tile + tl.arange(0, tile)
    live = index < count
    token = tl.load(found + index, mask=live, other=0)
    tl.store(picks + tl.load(outputs + index, mask=live, other=0), token, mask=live)


def publish_launch(picks: torch.Tensor, found: torch.Tensor, outputs: torch.Tensor) -> Launch:
    """picks[outputs[i]] = found[i], all int32."""
    return Launch(
        _publish_kernel,
        (-(-len(found) // _TILE), 1, 1),
        {"picks": picks, "found": found, "outputs": outputs, "count": len(found)},
        {"tile": _TILE},
        warps=4,
        stages=1,
    )
