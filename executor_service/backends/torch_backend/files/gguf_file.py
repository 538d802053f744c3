"""`GgufFile`: a GGUF file's metadata and tensors, every length checked against the file's size first.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The header
is untrusted input: it is parsed here, with a bound on every count. The `gguf` package dequantizes the blocks.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.base import ModelError
from executor_service.files.fields import check_apart

MAGIC = b"GGUF"
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_NAN_E8M0 = 255  # the first byte of a block of MXFP4 is its scale
_LENGTH = struct.Struct("<Q")
_MAX_ITEMS = 1 << 21  # of all metadata arrays: vocabularies of 2^18 have 1.3 million, merges included
_MAX_ENTRIES = 1 << 14  # of metadata; files have some dozens
MAX_TENSORS = 1 << 16
_MAX_HEADER_BYTES = 128 << 20  # with a vocabulary of 2^18 tokens it has 20 MB


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place in the file; `shape` outermost dimension first, `offset` and `size` in bytes."""

    shape: tuple[int, ...]
    kind: int  # a ggml type
    offset: int
    size: int
    map: mmap.mmap  # of the file, which may be another part of the model


class GgufFile:
    """An open GGUF file; tensors are read on demand. Raises ModelError on any fault of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        if self.size < 24:
            raise self.fault(f"truncated: {self.size} bytes are too few for a GGUF header")
        with path.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at, self._items = 0, 0  # header bytes and array items read so far
        self.others: list[GgufFile] = []  # further parts of the model, whose tensors are in `tensors`
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except ModelError:
            self.close()
            raise

    def close(self) -> None:
        """Close the memory mappings, or leave that to the last view of each, which an error may hold."""
        for other in self.others:
            other.close()
        with contextlib.suppress(BufferError):
            self.bytes.close()

    def fault(self, message: str) -> ModelError:
        """An error about this file."""
        return ModelError(f"{self.path.name}: {message}")

    def read(self, name: str, index: int | None = None) -> NDArray[np.float32]:
        """A tensor as fp32, or the part `index` of its first dimension; outermost dimension first."""
        import gguf  # only here: directories of safetensors are read without it
        from gguf import quants

        kind = gguf.GGMLQuantizationType(self.tensors[name].kind)
        try:
            with np.errstate(all="ignore"):  # non-finite values are found by `FiniteCheckpoint`
                values: NDArray[np.float32] = quants.dequantize(self.stored(name, index), kind)
        except NotImplementedError:
            raise self.fault(f"tensor {name!r}: the type {kind.name} can't be dequantized") from None
        return values

    def stored(self, name: str, index: int | None = None) -> NDArray[np.uint8]:
        """The blocks of a tensor's rows, bytes [rows, bytes], or of the part `index` of its first dimension.

        A view of the file's mapping, which can't be closed as long as the view lives. Raises ModelError for
        scales that are NaN, where what computes with them may take them for large numbers.
        """
        import gguf

        tensor = self.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.frombuffer(tensor.map, np.uint8, tensor.size, tensor.offset)
        rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        part = rows if index is None else rows[index]
        if kind is gguf.GGMLQuantizationType.MXFP4 and (part[..., ::block_bytes] == _NAN_E8M0).any():
            raise self.fault(f"tensor {name!r} has scales that are NaN")
        return part

    def _take(self, count: int, what: str) -> bytes:
        """The next `count` bytes of the header; `what` names them in the ModelError if there are fewer."""
        if count > self.size - self._at:
            raise self.fault(f"{what} at byte {self._at} runs beyond the file's {self.size} bytes")
        if self._at + count > _MAX_HEADER_BYTES:
            raise self.fault(f"{what} ends beyond the {_MAX_HEADER_BYTES} bytes of a header that are read")
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

    def _strings(self, count: int, what: str) -> list[str]:
        """As `count` calls of `_string`, faster: vocabularies and their merges are most of a header."""
        raw, end, strings = self.bytes, min(self.size, _MAX_HEADER_BYTES), []
        for _ in range(count):
            first = self._at + 8
            last = first + _LENGTH.unpack_from(raw, self._at)[0] if first <= end else end + 1
            if last > end:
                self._string(what)  # raises, and says why
            try:
                strings.append(raw[first:last].decode("utf-8"))
            except UnicodeDecodeError:
                raise self.fault(f"{what} is not UTF-8") from None
            self._at = last
        return strings

    def _value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            raise self.fault(f"{what} has the unknown type {kind}")
        item, count = self._scalar("<I", what), self._scalar("<Q", what)
        self._items += count
        if count > self.size - self._at or self._items > _MAX_ITEMS:
            raise self.fault(
                f"{what} claims {count} items, more than the file holds, "
                f"or than the {_MAX_ITEMS} of all arrays that are read"
            )
        if item in _SCALARS:
            code = _SCALARS[item]
            raw = self._take(count * struct.calcsize(code), what)
            return list(struct.unpack(f"<{count}{code[1]}", raw))
        if item == _STRING:
            return self._strings(count, what)
        raise self.fault(f"{what} has items of the unknown type {item}")

    def _read_header(self) -> None:
        if self._take(4, "magic") != MAGIC:
            raise self.fault("not a GGUF file: wrong magic")
        version = self._scalar("<I", "version")
        if version not in (2, 3):
            raise self.fault(f"GGUF version {version} is not supported, only 2 and 3")
        tensors, entries = self._scalar("<Q", "tensor count"), self._scalar("<Q", "metadata count")
        if tensors > MAX_TENSORS or entries > _MAX_ENTRIES:
            raise self.fault(
                f"claims {tensors} tensors and {entries} metadata entries, "
                f"at most {MAX_TENSORS} and {_MAX_ENTRIES} are read"
            )
        for _ in range(entries):
            key = self._string("a metadata key")
            if key in self.metadata:
                raise self.fault(f"the metadata key {key[:80]!r} is there twice")
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
            self.tensors[name] = GgufTensor(shape, kind, data + offset, size, self.bytes)
        check_apart(self.path.name, ((t.offset, t.offset + t.size, n) for n, t in self.tensors.items()))

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")[:200]
        dims = self._scalar("<I", f"dimensions of tensor {name!r}")
        if not 1 <= dims <= 4:
            raise self.fault(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._scalar("<Q", f"shape of tensor {name!r}") for _ in range(dims))
        kind = self._scalar("<I", f"type of tensor {name!r}")
        return name, shape[::-1], kind, self._scalar("<Q", f"offset of tensor {name!r}")

    def _tensor_size(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        """Bytes of a tensor; `kind` is its GGML type. Raises ModelError."""
        import gguf

        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self.fault(f"tensor {name!r} has the unknown type {kind}") from None
        if min(shape) < 1 or shape[-1] % block:
            raise self.fault(
                f"tensor {name!r} has the shape {shape}: each dimension must be positive, and the last "
                f"a multiple of {block}"
            )
        return math.prod(shape) // block * block_bytes
