"""`GgufCheckpoint`: a model in a GGUF file, or in several parts of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from service_kit.model_name import model_name

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.architecture.families import FAMILIES
from executor_service.backends.torch_backend.files.architecture.family_shared import QKV
from executor_service.backends.torch_backend.files.architecture.gguf_spec import spec_from_gguf
from executor_service.backends.torch_backend.files.architecture.rope.from_gguf import FACTOR_TENSORS
from executor_service.backends.torch_backend.files.gguf_blocks import FORMATS, unpack
from executor_service.backends.torch_backend.files.gguf_parts import open_gguf
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight
from executor_service.backends.torch_backend.files.stored_names import (
    SHARED_GATE,
    Place,
    is_rotated,
    order_of_halves,
    place_in_gguf,
)
from executor_service.backends.torch_backend.files.tensor_shapes import (
    Part,
    check_no_classifier,
    check_shape,
    expected_shapes,
)

_MAX_FACTORS = 4096  # of rotary frequencies


class GgufCheckpoint:
    """A GGUF file, or all parts of one.

    It stacks experts in one tensor and permutes rows of Llama's q and k; both is undone.
    Blocks beyond the model's layers draft tokens, and are not read.
    """

    def __init__(self, path: Path, *, blocks: bool = False) -> None:
        """`blocks`: `read_weight` returns numbers, scales and minima of the formats in `gguf_blocks`."""
        self.file, self._blocks = open_gguf(path), blocks
        self.quantization = "GGUF" if blocks else None
        try:
            check_no_classifier(self.file.tensors, path.name)
            factors = {name: self._factors(name) for name in FACTOR_TENSORS if name in self.file.tensors}
            self.spec = spec_from_gguf(self.file.metadata, self.file.tensors, factors, path.name)
            self.name = model_name(path)
            self._fused = (QKV,) if "blk.0.attn_qkv.weight" in self.file.tensors else ()
            self._check(path.name)
        except ModelError:
            self.close()
            raise

    def _check(self, where: str) -> None:
        used = set(FACTOR_TENSORS)
        for name, shape in expected_shapes(self.spec):
            place = self._place(name)
            tensor = self.file.tensors.get(place.name)
            found = {} if tensor is None else {name: tensor.shape}
            if place.rows is not None:
                shape = place.all_rows, *shape[1:]
            if self.spec.moe is not None and place.expert is not None:
                shape = self.spec.moe.experts, *shape
            if name.endswith(SHARED_GATE) and found.get(name) == shape[1:]:
                shape = shape[1:]
            check_shape(name, shape, found, where)
            used.add(place.name)
        for stored in self.file.tensors:
            if stored not in used and not self._drafts(stored):
                raise self.file.fault(f"tensor {stored!r} is no part of a {self.spec.architecture} model")

    def _place(self, name: str) -> Place:
        return place_in_gguf(self.spec, name, self._fused)

    def _drafts(self, stored: str) -> bool:
        """Whether a tensor is of a block that drafts tokens."""
        blocks = self.file.metadata[f"{self.file.metadata['general.architecture']}.block_count"]
        first, number, *_ = *stored.split("."), ""
        return first == "blk" and number.isdecimal() and self.spec.layers <= int(number) < blocks

    def _factors(self, name: str) -> tuple[float, ...]:
        """Divisors of the rotary frequencies, of a tensor that has one for each. Raises ModelError."""
        shape = self.file.tensors[name].shape
        if len(shape) != 1 or shape[0] > _MAX_FACTORS:
            raise self.file.fault(f"tensor {name!r} has the shape {shape}, expected up to ({_MAX_FACTORS},)")
        factors = self.file.read(name).copy()  # nothing of the file's mapping outlives it
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise self.file.fault(f"tensor {name!r}: the rotary factors are not all finite and positive")
        return tuple(factors.tolist())

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """As `Checkpoint.read`; dequantizes the whole tensor to read a part."""
        place = self._place(name)
        whole = self.file.read(place.name, place.expert)
        tensor = torch.from_numpy(self._rows(name, place, whole).copy())
        return tensor if part is None else tensor[part].clone()

    def read_weight(self, name: str, part: Part | None = None) -> Weight:
        """As `read`; with `blocks`, the formats of `gguf_blocks` are not dequantized."""
        place = self._place(name)
        kind = self.file.tensors[place.name].kind
        if not self._blocks or kind not in FORMATS:
            return self.read(name, part)
        rows, columns = (*(part or ()), slice(None), slice(None))[:2]
        stored = self._rows(name, place, self.file.stored(place.name, place.expert))[rows]
        numbers, scales, minima = unpack(kind, stored)
        weight = ScaledNumbers(
            torch.from_numpy(numbers),
            torch.from_numpy(scales),
            torch.arange(numbers.shape[1]) // (numbers.shape[1] // scales.shape[1]),
            None if minima is None else torch.from_numpy(minima),
        )
        return weight if columns == slice(None) else weight.part(slice(None), columns)

    def _rows(self, name: str, place: Place, stored: NDArray[Any]) -> NDArray[Any]:
        """The rows of one of the model's tensors, in its order, of what is stored at its place."""
        rows = stored if place.rows is None else stored[place.rows]
        if name.endswith(SHARED_GATE):
            rows = rows.reshape(1, -1)  # llama.cpp has it as a vector
        if FAMILIES[self.spec.architecture].gguf_pairs and is_rotated(name):
            rows = rows[order_of_halves(len(rows), self.spec.head_dim, self.spec.rotary_dim)]
        return rows

    def files(self) -> list[Path]:
        return [file.path for file in (self.file, *self.file.others)]

    def close(self) -> None:
        self.file.close()
