"""Tokens that were picked again, in one Triton kernel: to the step's picks, and to the rows that follow."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from executor_service.backends.torch_backend.cuda.launch import Launch

_TILE = 256  # tokens of a program


@triton.jit(do_not_specialize=("picks", "found", "outputs", "targets", "count"))
def _publish_kernel(picks, sampled, found, outputs, targets, count, tile: tl.constexpr):
    """Program (tile of tokens): store each token twice."""
    index = tl.program_id(0) * tile + tl.arange(0, tile)
    live = index < count
    token = tl.load(found + index, mask=live, other=0)
    tl.store(picks + tl.load(outputs + index, mask=live, other=0), token, mask=live)
    target = tl.load(targets + index, mask=live, other=-1)
    tl.store(sampled + target, token, mask=live & (target >= 0))


def publish_launch(
    picks: torch.Tensor,
    sampled: torch.Tensor,
    found: torch.Tensor,
    outputs: torch.Tensor,
    targets: torch.Tensor,
) -> Launch:
    """picks[outputs[i]] = found[i], and sampled[targets[i]] = found[i] where targets[i] is not negative.

    All are int32; found, outputs and targets have one length.
    """
    return Launch(
        _publish_kernel,
        (-(-len(found) // _TILE), 1, 1),
        {
            "picks": picks, "sampled": sampled, "found": found, "outputs": outputs, "targets": targets,
            "count": len(found),
        },
        {"tile": _TILE},
        warps=4,
        stages=1,
    )  # fmt: skip
