"""`QuantizedModule`: the tensors of one linear layer of a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_service.backends.torch_backend.files.safetensors_dir import SafetensorsDirectory, ShardTensor
from executor_service.contract.model_error import ModelError
from executor_service.files.safetensors_header import FLOATS


class QuantizedModule:
    """Reads a module's tensors by their suffixes, as in "qweight". All errors name the tensor."""

    def __init__(self, name: str, store: SafetensorsDirectory) -> None:
        self.name, self._store = name, store

    def has(self, suffix: str) -> bool:
        """Whether the file has this tensor."""
        return f"{self.name}.{suffix}" in self._store.tensors

    def entry(self, suffix: str, dtypes: frozenset[str] | str = FLOATS) -> ShardTensor:
        """A tensor's header. Raises ModelError if it is missing or has none of the dtypes."""
        tensor = self._store.tensors.get(f"{self.name}.{suffix}")
        if tensor is None:
            raise self.fault(suffix, "is missing")
        wanted = frozenset((dtypes,)) if isinstance(dtypes, str) else dtypes
        if tensor.dtype not in wanted:
            expected = ", ".join(sorted(wanted))
            raise self.fault(suffix, f"has the dtype {tensor.dtype}, expected {expected}")
        return tensor

    def matrix(self, suffix: str, dtype: str) -> tuple[int, int]:
        """The shape of a tensor with two dimensions, none of them 0. Raises ModelError."""
        shape = self.entry(suffix, dtype).shape
        if len(shape) != 2 or 0 in shape:
            raise self.fault(suffix, f"has the shape {shape}, expected two dimensions")
        return shape[0], shape[1]

    def expect(self, suffix: str, dtypes: frozenset[str] | str, *shapes: Sequence[int]) -> None:
        """Raises ModelError unless the tensor is there, with one of the dtypes and one of the shapes."""
        shape = self.entry(suffix, dtypes).shape
        if shape not in map(tuple, shapes):
            expected = " or ".join(str(tuple(one)) for one in shapes)
            raise self.fault(suffix, f"has the shape {shape}, expected {expected}")

    def read(self, suffix: str) -> torch.Tensor:
        """A tensor in its stored dtype."""
        return self._store.read(f"{self.name}.{suffix}")

    def scales(self, suffix: str, *, signed: bool = False, columns: int | None = None) -> torch.Tensor:
        """Scales, fp32, of which the first columns are used.

        Raises ModelError if one is not finite, is 0, or is negative and not `signed`.
        """
        scales = self.read(suffix).float()
        if columns is not None:
            scales = scales[:, :columns]
        if not scales.isfinite().all():
            raise self.fault(suffix, "has scales that are NaN or infinite")
        if not (scales.abs() if signed else scales).gt(0).all():
            raise self.fault(suffix, f"has scales of 0{'' if signed else ' or less'}")
        return scales

    def groups(self, suffix: str, count: int) -> torch.Tensor:
        """The group of each column, int64 [k]. Raises ModelError if one is none of `count` groups."""
        groups = self.read(suffix).long()
        low, high = groups.aminmax()
        if low < 0 or high >= count:
            wrong = int(low if low < 0 else high)
            raise self.fault(suffix, f"has the group {wrong}, but there are groups 0 to {count - 1}")
        return groups

    def fault(self, suffix: str, message: str) -> ModelError:
        """An error about one of the tensors."""
        name = f"{self.name}.{suffix}"
        tensor = self._store.tensors.get(name)
        where = self._store.path if tensor is None else tensor.file
        return ModelError(f"{where.name}: tensor {name!r} {message}")
