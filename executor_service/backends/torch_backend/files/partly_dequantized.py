"""`KeptWeights`: a checkpoint whose quantized weights stay as they are where kernels multiply them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight
from executor_service.backends.torch_backend.files.tensor_shapes import Part
from executor_service.backends.torch_backend.files.weights import Checkpoint


class KeptWeights:
    """A `Checkpoint` that dequantizes what `keeps` refuses, and counts both."""

    def __init__(self, checkpoint: Checkpoint, keeps: Callable[[ScaledNumbers], bool]) -> None:
        self.name, self.spec, self.quantization = checkpoint.name, checkpoint.spec, checkpoint.quantization
        self.kept = self.dequantized = 0  # weights
        self._checkpoint, self._keeps = checkpoint, keeps

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        return self._checkpoint.read(name, part)

    def read_weight(self, name: str, part: Part | None = None) -> Weight:
        """As `Checkpoint.read_weight`, dequantized to fp32 if no kernel multiplies it."""
        weight = self._checkpoint.read_weight(name, part)
        if not isinstance(weight, ScaledNumbers):
            return weight
        if self._keeps(weight):
            self.kept += 1
            return weight
        self.dequantized += 1
        return weight.plain()

    def files(self) -> list[Path]:
        return self._checkpoint.files()

    def close(self) -> None:
        self._checkpoint.close()
