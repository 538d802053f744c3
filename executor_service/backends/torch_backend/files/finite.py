"""`FiniteCheckpoint`: checks weights for NaN and infinity while they are read."""

from __future__ import annotations

from pathlib import Path

import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight
from executor_service.backends.torch_backend.files.tensor_shapes import Part
from executor_service.backends.torch_backend.files.weights import Checkpoint


class FiniteCheckpoint:
    """A `Checkpoint` that refuses tensors with values that are not finite in `dtype`, the arithmetic's.

    One such value would make every row non-finite. Quantized blocks are checked after dequantization, which
    also finds non-finite scales, or by the largest magnitude of each row and its scales.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.name, self.spec, self.quantization = checkpoint.name, checkpoint.spec, checkpoint.quantization
        self._checkpoint, self._dtype = checkpoint, dtype
        self._largest = torch.finfo(dtype).max

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """As `Checkpoint.read`. Raises ModelError naming the tensor if a value is not finite."""
        return self._checked(name, self._checkpoint.read(name, part))

    def read_weight(self, name: str, part: Part | None = None) -> Weight:
        """As `Checkpoint.read_weight`. Raises ModelError naming the tensor if a value is not finite."""
        weight = self._checkpoint.read_weight(name, part)
        if isinstance(weight, ScaledNumbers):
            self._checked(name, weight.magnitudes())
            return weight
        return self._checked(name, weight)

    def files(self) -> list[Path]:
        return self._checkpoint.files()

    def close(self) -> None:
        self._checkpoint.close()

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        low, high = tensor.aminmax()  # NaN if any number is; a tenth of the time of isfinite().all()
        if not (low >= -self._largest and high <= self._largest):
            what = "NaN" if low.isnan() else f"numbers of magnitude {max(-float(low), float(high)):g}"
            dtype = str(self._dtype).removeprefix("torch.")
            raise ModelError(f"{self.name}: tensor {name!r} has {what}, which {dtype} can't compute with")
        return tensor
