"""`GgufFile`: a GGUF file's metadata and tensors, every length checked against the file's size first.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The header is
walked here, because it comes from strangers; the `gguf` package dequantizes the blocks.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import ModelError

MAGIC = b"GGUF"
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 24  # of one metadata array: the largest vocabularies have 2^18
_MAX_TENSORS = 1 << 17


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies; `shape` outermost dimension first, `offset` and `size` in bytes."""

    shape: tuple[int, ...]
    kind: int  # a ggml type
    offset: int
    size: int


class GgufFile:
    """An open GGUF file; tensors are read on demand. Raises ModelError on any fault of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        if self.size < 24:
            raise self.fault(f"truncated: {self.size} bytes are too few for a GGUF header")
        with path.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except ModelError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the mapping."""
        self.bytes.close()

    def fault(self, message: str) -> ModelError:
        """An error about this file."""
        return ModelError(f"{self.path.name}: {message}")

    def read(self, name: str, index: int | None = None) -> NDArray[np.float32]:
        """A tensor as fp32, or the part `index` of its first dimension; outermost dimension first."""
        import gguf  # only here: directories of safetensors are read without it
        from gguf import quants

        tensor = self.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.frombuffer(self.bytes, np.uint8, tensor.size, tensor.offset)
        rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        try:
            values: NDArray[np.float32] = quants.dequantize(rows if index is None else rows[index], kind)
        except NotImplementedError:
            raise self.fault(f"tensor {name!r}: the type {kind.name} can't be dequantized") from None
        return values

    def _take(self, count: int, what: str) -> bytes:
        if count > self.size - self._at:
            raise self.fault(f"{what} at byte {self._at} runs beyond the file's {self.size} bytes")
        self._at += count
        return self.bytes[self._at - count : self._at]

    def _scalar(self, code: str, what: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code), what))[0]

    def _string(self, what: str) -> str:
        length = self._scalar("<Q", f"length of {what}")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8") from None

    def _value(self, kind: int, what: str, nested: bool = False) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY or nested:
            raise self.fault(f"{what} has the unknown type {kind}")
        item, count = self._scalar("<I", what), self._scalar("<Q", what)
        if count > min(_MAX_ITEMS, self.size - self._at):
            raise self.fault(f"{what} claims {count} items, more than the file or this reader holds")
        if item in _SCALARS:
            code = _SCALARS[item]
            raw = self._take(count * struct.calcsize(code), what)
            return list(struct.unpack(f"<{count}{code[1]}", raw))
        return [self._value(item, what, nested=True) for _ in range(count)]

    def _read_header(self) -> None:
        if self._take(4, "magic") != MAGIC:
            raise self.fault("not a GGUF file: wrong magic")
        version = self._scalar("<I", "version")
        if version not in (2, 3):
            raise self.fault(f"GGUF version {version} is not supported, only 2 and 3")
        tensors, entries = self._scalar("<Q", "tensor count"), self._scalar("<Q", "metadata count")
        if tensors > _MAX_TENSORS or entries > _MAX_TENSORS:
            raise self.fault(f"claims {tensors} tensors and {entries} metadata entries")
        for _ in range(entries):
            key = self._string("a metadata key")
            kind = self._scalar("<I", f"type of {key[:80]!r}")
            self.metadata[key] = self._value(kind, f"metadata {key[:80]!r}")
        found = [self._tensor_entry() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self.fault(f"general.alignment is {str(alignment)[:40]!r}")
        data = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in found:
            size = self._tensor_size(name, shape, kind)
            if offset + size > self.size - data:
                raise self.fault(
                    f"tensor {name!r} lies at bytes {data + offset} to {data + offset + size}, "
                    f"beyond the file's {self.size}"
                )
            if name in self.tensors:
                raise self.fault(f"tensor {name!r} is there twice")
            self.tensors[name] = GgufTensor(shape, kind, data + offset, size)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")[:200]
        dims = self._scalar("<I", f"dimensions of tensor {name!r}")
        if not 1 <= dims <= 4:
            raise self.fault(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._scalar("<Q", f"shape of tensor {name!r}") for _ in range(dims))
        kind = self._scalar("<I", f"type of tensor {name!r}")
        return name, shape[::-1], kind, self._scalar("<Q", f"offset of tensor {name!r}")

    def _tensor_size(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        import gguf

        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self.fault(f"tensor {name!r} has the unknown type {kind}") from None
        if min(shape) < 1 or shape[-1] % block:
            raise self.fault(f"tensor {name!r} has the shape {shape}, not in whole blocks of {block}")
        return math.prod(shape) // block * block_bytes
