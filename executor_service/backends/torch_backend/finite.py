"""`FiniteCheckpoint`: checks weights for NaN and infinity while they are read."""

from __future__ import annotations

from pathlib import Path

import torch

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.weights import Checkpoint, Part


class FiniteCheckpoint:
    """A `Checkpoint` that refuses tensors with values that are not finite in `dtype`, the arithmetic's.

    One such value would make every row non-finite. Quantized blocks are checked after dequantization, which
    also finds non-finite scales.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.name, self.spec, self.quantization = checkpoint.name, checkpoint.spec, checkpoint.quantization
        self._checkpoint, self._dtype = checkpoint, dtype
        self._largest = torch.finfo(dtype).max

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """As `Checkpoint.read`. Raises ModelError naming the tensor if a value is not finite."""
        tensor = self._checkpoint.read(name, part)
        low, high = tensor.aminmax()  # NaN if any number is; a tenth of the time of isfinite().all()
        if not (low >= -self._largest and high <= self._largest):
            what = "NaN" if low.isnan() else f"numbers of magnitude {max(-float(low), float(high)):g}"
            dtype = str(self._dtype).removeprefix("torch.")
            raise ModelError(f"{self.name}: tensor {name!r} has {what}, which {dtype} can't compute with")
        return tensor

    def files(self) -> list[Path]:
        return self._checkpoint.files()

    def close(self) -> None:
        self._checkpoint.close()
