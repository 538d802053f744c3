"""`Activation`: the functions of the gate in gated MLPs."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch.nn import functional

CLAMP, SLOPE = 7.0, 1.702  # of `Activation.CLAMPED`


class Activation(IntEnum):
    """By the number that kernels know it by."""

    SILU = 0
    """x * sigmoid(x): SwiGLU (Shazeer 2020)."""
    GELU = 1
    """x * Phi(x), by its approximation with tanh (Hendrycks, Gimpel 2016): GeGLU."""

    CLAMPED = 2
    """gpt-oss's: x * sigmoid(1.702 x), of gates up to 7, times 1 + the other factor between -7 and 7."""

    def join(self, both: torch.Tensor) -> torch.Tensor:
        """Gated rows: of the left half of each, times its right half; `both` may be overwritten."""
        gate, up = both.chunk(2, dim=-1)
        if self is Activation.SILU:
            return functional.silu(gate) * up
        if self is Activation.GELU:
            return functional.gelu(gate, approximate="tanh") * up
        gate.clamp_(max=CLAMP)
        up.clamp_(-CLAMP, CLAMP)
        return up.add_(1).mul_(gate).mul_(sigmoid(SLOPE * gate)).contiguous()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Of [..., columns], with the same bits for a row wherever in a batch it is."""
    # In a view of a wider buffer: in a contiguous one, the last numbers take another way through torch's
    # sigmoid, by their place in the whole batch.
    columns = x.shape[-1]
    return x.new_empty((*x.shape[:-1], columns + 1))[..., :columns].copy_(x).sigmoid_()
