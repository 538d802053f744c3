"""`Activation`: the functions of the gate in gated MLPs."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch.nn import functional


class Activation(IntEnum):
    """By the number that kernels know it by."""

    SILU = 0
    """x * sigmoid(x): SwiGLU (Shazeer 2020)."""
    GELU = 1
    """x * Phi(x), by its approximation with tanh (Hendrycks, Gimpel 2016): GeGLU."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Element by element."""
        return functional.silu(x) if self is Activation.SILU else functional.gelu(x, approximate="tanh")
