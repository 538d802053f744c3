"""`Launch`: a Triton kernel with all it is launched with, so that it can be compiled without being run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Arguments = dict[str, torch.Tensor | int | float]
"""What a kernel is given, by name."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch; all but what the tensors hold is known when a CUDA graph is captured."""

    kernel: Any  # a @triton.jit function
    grid: tuple[int, int, int]
    arguments: Mapping[str, torch.Tensor | int | float]
    constants: Mapping[str, int]  # tl.constexpr
    warps: int
    stages: int

    def run(self) -> None:
        """Enqueue it on the current stream."""
        self.kernel[self.grid](
            **self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages
        )


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
