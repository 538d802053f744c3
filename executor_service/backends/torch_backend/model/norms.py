"""`Norms`: the RMSNorms of a model, where it has them."""

from __future__ import annotations

from typing import Any

import torch

from executor_service.backends.torch_backend.ops.kernels import Kernels, Linear


class Norms:
    """The RMSNorms of a model, by their weights; None: there is no norm."""

    def __init__(self, kernels: Kernels, eps: float) -> None:
        self._kernels, self._eps = kernels, eps

    def of(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """x [rows, hidden], normed."""
        return x if weight is None else self._kernels.rms_norm(x, weight, self._eps)

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
