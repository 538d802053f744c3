"""`Norms`: the RMSNorms of a model, where it has them."""

from __future__ import annotations

from typing import Any

import torch

from executor_service.backends.torch_backend.ops.kernels import GatedLinear, Kernels, Linear, OfNormed


class Norms:
    """The RMSNorms of a model, by their weights; None: there is no norm."""

    def __init__(self, kernels: Kernels, eps: float) -> None:
        self._kernels, self._eps = kernels, eps

    def of(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """x [rows, hidden], normed."""
        return x if weight is None else self._kernels.rms_norm(x, weight, self._eps)

    def before(
        self,
        layer: Linear | GatedLinear,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        change: Any = None,
    ) -> torch.Tensor:
        """layer(x), normed before."""
        if weight is not None and isinstance(layer, OfNormed):
            return layer.of_normed(x, weight, self._eps, change)
        return layer(self.of(x, weight), change=change)

    def add(self, x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor) -> None:
        """residual += x, normed."""
        if weight is None:
            residual += x
        else:
            self._kernels.rms_norm(x, weight, self._eps, add_to=residual)

    def add_linear(
        self,
        linear: Linear,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        residual: torch.Tensor,
        change: Any = None,
    ) -> None:
        """residual += linear(x), normed."""
        if weight is None:
            linear(x, add_to=residual, change=change)
        else:
            self.add(linear(x, change=change), weight, residual)
