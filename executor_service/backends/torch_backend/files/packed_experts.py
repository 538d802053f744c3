"""`PackedExperts`: a directory with all experts of a layer in one tensor (gpt-oss), as tensors of each.

Source: `GptOssExperts` and `convert_moe_packed_tensors` of transformers 5. A weight of the files multiplies
from the right, [in, out], and gates alternate with ups. In MXFP4 (OCP Microscaling Formats 1.0) it is
[out, in]: blocks of 32 numbers E2M1, two in a byte, the lower half first, and a scale E8M0 for each.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import torch

from executor_service.backends.torch_backend.files.checkpoints.formats import TensorDirectory
from executor_service.backends.torch_backend.files.safetensors_dir import ShardTensor
from executor_service.backends.torch_backend.files.scaled_numbers import ScaledNumbers, Weight, plain
from executor_service.contract.model_error import ModelError

_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
_HALVES = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}  # of the outputs of gate_up_proj
_BLOCK, _BYTES = 32, 16  # numbers of a block, and their bytes
_TWICE_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
_BIAS_E8M0, _NAN_E8M0 = 127, 255


class _StoredPlace(NamedTuple):
    """Where a tensor of one expert is."""

    stored: str
    expert: int
    outputs: slice


class PackedExperts:
    """As the `TensorDirectory` that it reads. Raises ModelError for stacks that do not fit each other."""

    def __init__(self, store: TensorDirectory, experts: int) -> None:
        """`experts`: how many there should be; of one more the name is listed, so that it is noticed."""
        self.title, self.files = store.title, store.files
        self._store = store
        self._places: dict[str, _StoredPlace] = {}
        self.tensors: dict[str, ShardTensor] = {}
        for name, tensor in store.tensors.items():
            match = _STACKED.fullmatch(name)
            if match is None:
                if tensor.dtype == "U8":
                    raise self._fault(name, "has the dtype U8, but is not of an expert")
                self.tensors[name] = tensor
            elif match[3] != "_scales":
                self._add(name, match[1], match[2], match[3] or "", experts + 1)
            elif name.replace("_scales", "_blocks") not in store.tensors:
                raise self._fault(name, "has no _blocks beside it")

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """As `SafetensorsDirectory.read`; in MXFP4, dequantized to fp32."""
        return plain(self.read_weight(name, part))

    def read_weight(self, name: str, part: tuple[slice, ...] | None = None) -> Weight:
        """A tensor or a part of it; in MXFP4, numbers and scales. Raises ModelError for NaN scales."""
        place = self._places.get(name)
        if place is None:
            return self._store.read_weight(name, part)
        one = (slice(place.expert, place.expert + 1),)
        stored = self._store.read(place.stored, one)[0]
        if place.stored.endswith("_blocks"):
            scales_name = place.stored.replace("_blocks", "_scales")
            scales = self._store.read(scales_name, one)[0][place.outputs]
            if (scales == _NAN_E8M0).any():
                raise self._fault(scales_name, "has scales that are NaN")
            weight = _scaled(stored[place.outputs], scales)
            return weight if part is None else weight.part(*part)
        outputs = stored[place.outputs] if stored.ndim == 1 else stored[:, place.outputs].T
        return (outputs if part is None else outputs[part]).contiguous()

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._store.close()

    def _add(self, name: str, experts: str, layer: str, kind: str, most: int) -> None:
        shape = self._checked(name, kind)
        width = shape[1 if kind in ("_bias", "_blocks") else 2]
        if layer == "gate_up_proj" and width % 2:
            raise self._fault(name, f"has {width} outputs, no pairs of gate and up")
        for ours, outputs in _HALVES.items() if layer == "gate_up_proj" else [(layer, slice(None))]:
            count = len(range(width)[outputs])
            of_each: tuple[int, ...] = (count,)
            if kind != "_bias":
                of_each = (count, shape[2] * _BLOCK if kind == "_blocks" else shape[1])
            for expert in range(min(shape[0], most)):
                found = f"{experts}.{expert}.{ours}.{'bias' if kind == '_bias' else 'weight'}"
                if found in self.tensors:
                    raise self._fault(name, "is there in two formats")
                self._places[found] = _StoredPlace(name, expert, outputs)
                self.tensors[found] = ShardTensor("F32", of_each, self._store.tensors[name].file)

    def _checked(self, name: str, kind: str) -> tuple[int, ...]:
        """A stack's shape."""
        tensor = self._store.tensors[name]
        blocks = kind == "_blocks"
        dimensions = {"_bias": 2, "_blocks": 4}.get(kind, 3)
        if len(tensor.shape) != dimensions or 0 in tensor.shape or (blocks and tensor.shape[-1] != _BYTES):
            last = f", the last {_BYTES}" if blocks else ""
            raise self._fault(name, f"has the shape {tensor.shape}, expected {dimensions} dimensions{last}")
        if blocks != (tensor.dtype == "U8"):
            raise self._fault(name, f"has the dtype {tensor.dtype}")
        if blocks:
            scales = self._store.tensors.get(name.replace("_blocks", "_scales"))
            if scales is None or scales.shape != tensor.shape[:-1] or scales.dtype != "U8":
                found = "missing" if scales is None else f"{scales.dtype} {scales.shape}"
                raise self._fault(
                    name, f"needs _scales in U8 of the shape {tensor.shape[:-1]}, which are {found}"
                )
        return tensor.shape

    def _fault(self, name: str, message: str) -> ModelError:
        return ModelError(f"{self._store.tensors[name].file.name}: tensor {name[:80]!r} {message}")


def _scaled(blocks: torch.Tensor, scales: torch.Tensor) -> ScaledNumbers:
    """Blocks uint8 [n, groups, 16] and scales uint8 [n, groups] as whole numbers and halved scales."""
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1)
    numbers = _TWICE_E2M1[halves.int()].reshape(len(blocks), -1)
    powers = np.ldexp(np.float32(0.5), scales.numpy().astype(np.int32) - _BIAS_E8M0)
    return ScaledNumbers(numbers, torch.from_numpy(powers), torch.arange(numbers.shape[1]) // _BLOCK)
