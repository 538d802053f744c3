"""`Launch`: a Triton kernel with everything a launch needs, so that tests can compile it without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

Arguments = dict[str, torch.Tensor | int | float]
"""A kernel's arguments by name."""
_dependent: ContextVar[bool] = ContextVar("dependent", default=False)


@contextmanager
def dependent_launches(*, on: bool) -> Iterator[None]:
    """Inside, with `on`, this thread launches Triton kernels dependently: from compute capability 9.0."""
    token = _dependent.set(on)
    try:
        yield
    finally:
        _dependent.reset(token)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. A CUDA graph repeats it with everything unchanged but the tensors' contents."""

    kernel: Any  # a @triton.jit function
    grid: tuple[int, int, int]
    arguments: Mapping[str, torch.Tensor | int | float]
    constants: Mapping[str, int]  # tl.constexpr parameters
    warps: int
    stages: int
    registers: int = 0  # of a thread, at most; 0: as many as the compiler finds best

    def run(self) -> None:
        """Enqueue the kernel on the current stream, dependently within `dependent_launches`."""
        self.kernel[self.grid](**self.arguments, **self.constants, **self._options())

    def compiled(self) -> Any:
        """The kernel that `run` would launch, compiled and loaded; it has `n_regs` and `metadata`."""
        made = self.kernel.warmup(grid=self.grid, **self.arguments, **self.constants, **self._options())
        made._init_handles()
        return made

    def _options(self) -> dict[str, int]:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if self.registers:
            options["maxnreg"] = self.registers
        if _dependent.get():
            options["launch_pdl"] = True
        return options


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
