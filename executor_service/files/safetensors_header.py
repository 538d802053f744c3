"""The header of a safetensors file, checked before anything is allocated by it.

Format: github.com/huggingface/safetensors: 8 bytes of length, the header as JSON, the tensors' bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, BinaryIO

from executor_service.contract.model_error import ModelError
from executor_service.files.fields import check_apart
from executor_service.files.json_file import MAX_JSON_BYTES, parse_json

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
"""The dtypes of weights that are not quantized."""
QUANTIZED = frozenset(("F8_E4M3", "I64", "I32", "I8"))
"""The dtypes of quantized weights and of what belongs to them."""


_MAX_DIMENSIONS = 5  # kernels over time, rows and columns of images


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file: what it is, and where it lies."""

    dtype: str  # of FLOATS or QUANTIZED
    shape: tuple[int, ...]
    begin: int  # offset in the file, in bytes
    end: int


def read_entries(
    stream: BinaryIO, size: int, name: str, max_tensors: int, dtypes: frozenset[str] = FLOATS
) -> dict[str, TensorEntry]:
    """The tensors of a file of `size` bytes, by name; `name` is the file's in messages.

    Every one has one of `dtypes`, lies within the file and apart from the others, and is as long as its dtype
    and shape say. Raises ModelError.
    """
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
        raise ModelError(
            f"{name}: a header of {length} bytes does not fit the file's {size}, "
            f"or the {MAX_JSON_BYTES} that are read"
        )
    header = parse_json(stream.read(length), f"{name}: the header")
    header.pop("__metadata__", None)
    if len(header) > max_tensors:
        raise ModelError(f"{name}: more than {max_tensors} tensors")
    found = {
        tensor: _entry(name, tensor, entry, 8 + length, size, dtypes) for tensor, entry in header.items()
    }
    check_apart(name, ((entry.begin, entry.end, tensor) for tensor, entry in found.items()))
    return found


def _entry(file: str, name: str, entry: Any, data: int, size: int, dtypes: frozenset[str]) -> TensorEntry:
    """A header's entry; the tensors' bytes begin at `data`. Raises ModelError if it contradicts itself."""

    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)

    if not isinstance(entry, dict) or not whole(entry.get("shape")) or not whole(entry.get("data_offsets")):
        raise ModelError(f"{file}: tensor {name[:80]!r} has no proper shape and offsets")
    dtype, shape, offsets = entry.get("dtype"), tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise ModelError(f"{file}: tensor {name[:80]!r} has the unsupported dtype {str(dtype)[:20]!r}")
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - data:
        raise ModelError(f"{file}: tensor {name[:80]!r} lies at {offsets}, outside of {size - data} bytes")
    if len(shape) > _MAX_DIMENSIONS or math.prod(shape) * _ITEM_BYTES[dtype] != offsets[1] - offsets[0]:
        raise ModelError(f"{file}: tensor {name[:80]!r} of shape {shape} does not fill {offsets}")
    return TensorEntry(dtype, shape, data + offsets[0], data + offsets[1])
