"""Linear layers of 16 and 32 bits on CUDA: the product is chosen by the number of rows.

Layers with int8 or fp8 weights are in `quantized.py`, those with weights of 4 bits in `packed_linear.py`, and
choose in the same way.
"""

from __future__ import annotations

from typing import Protocol

import torch

from executor_service.backends.torch_backend.cuda.linear.pointwise import gated
from executor_service.backends.torch_backend.cuda.linear.skinny_gemm import NARROW_ROWS, few_rows_launch
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from executor_service.backends.torch_backend.ops.kernels import Linear, PlainGated, PlainLinear
from executor_service.backends.torch_backend.ops.low_rank import LinearChange


class CudaLinear(PlainLinear):
    """x W^T + b, in fp32. Without b, `add_to` is accumulated by the matrix product, in one launch."""

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, change: LinearChange | None = None
    ) -> torch.Tensor:
        if add_to is None or self._bias is not None:
            return super().__call__(x, add_to, change)
        out = add_to.addmm_(x, self.weight.T)
        if change is not None:
            change.add(x, out)
        return out


class NarrowLinear(CudaLinear):
    """As CudaLinear, in 16 bits. Up to NARROW_ROWS rows have a product of their own.

    That one reads weights once, and accumulates `add_to` with a bias, too.
    """

    gated_rows = NARROW_ROWS
    """Of a product that has the gate in it, at most."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, arrivals: torch.Tensor) -> None:
        """`arrivals`: of `skinny_gemm.new_arrivals`."""
        super().__init__(weight, bias)
        self._arrivals = arrivals

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, change: LinearChange | None = None
    ) -> torch.Tensor:
        if len(x) > NARROW_ROWS:
            return super().__call__(x, add_to, change)
        out = x.new_empty(len(x), len(self.weight)) if add_to is None else add_to
        few_rows_launch(
            with_lines(x), self.weight, self._bias, out, self._arrivals, add=add_to is not None
        ).run()
        if change is not None:
            change.add(x, out)
        return out

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The gated product of up to `gated_rows` rows, where half of the outputs are gates."""
        out = x.new_empty(len(x), len(self.weight) // 2)
        few_rows_launch(
            with_lines(x), self.weight, self._bias, out, self._arrivals, activation=activation
        ).run()
        return out


class GatesRows(Linear, Protocol):
    """A linear layer with a product that has the gate in it."""

    gated_rows: int  # of that product, at most

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[rows, k] to half of the outputs, where the others are gates."""


class NarrowGated(PlainGated):
    """As PlainGated; few rows have one product, with the gate."""

    def __init__(self, both: GatesRows, activation: Activation) -> None:
        super().__init__(both, gated, activation)
        self._few = both

    def __call__(self, x: torch.Tensor, change: LinearChange | None = None) -> torch.Tensor:
        if len(x) > self._few.gated_rows or change is not None:  # which adapters have before the gate
            return super().__call__(x, change)
        return self._few.gated(x, self._activation)


class WideLinear(PlainLinear):
    """x W^T with a result in fp32: rounded to bf16, the largest logits would often be equal."""

    def __init__(self, weight: torch.Tensor, arrivals: torch.Tensor) -> None:
        super().__init__(weight, None)
        self._arrivals = arrivals

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, change: LinearChange | None = None
    ) -> torch.Tensor:
        assert change is None  # no adapter changes the output layer
        if len(x) > NARROW_ROWS:
            out = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        else:
            out = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
            few_rows_launch(with_lines(x), self.weight, None, out, self._arrivals).run()
        return out if add_to is None else add_to.add_(out)


def with_lines(x: torch.Tensor) -> torch.Tensor:
    """x, with contiguous columns."""
    return x if x.stride(1) == 1 else x.contiguous()
