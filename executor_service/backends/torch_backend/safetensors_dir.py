"""`SafetensorsDirectory`: the tensors of a Hugging Face model directory, read on demand.

Format: github.com/huggingface/safetensors. Each header is checked against its file's size, and its tensors
are counted, before the library reads it. A shard outside of the directory is refused.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.json_file import MAX_JSON_BYTES, parse_json, read_json

_MAX_TENSORS = 1 << 16  # of all shards; Qwen3-235B-A22B has 37,000
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """A tensor of one shard file."""

    shape: tuple[int, ...]
    file: Path


class SafetensorsDirectory:
    """All tensors of `model.safetensors`, or of the shards its index names. Raises ModelError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = self._shards()
        self.tensors: dict[str, ShardTensor] = {}
        self._open: dict[Path, Any] = {}  # kept open, because the library reads the header at each opening
        self._exits = ExitStack()
        for file in self.files:
            for name, shape in _header(file, _MAX_TENSORS - len(self.tensors)).items():
                if name in self.tensors:
                    raise ModelError(
                        f"{file.name}: tensor {name!r} is also in {self.tensors[name].file.name}"
                    )
                self.tensors[name] = ShardTensor(shape, file)

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor in its stored dtype, or a part of it; reads only that part's bytes. Raises ModelError."""
        file = self.tensors[name].file
        try:
            if file not in self._open:
                self._open[file] = self._exits.enter_context(safe_open(file, framework="pt"))
            shard = self._open[file]
            tensor: torch.Tensor = shard.get_tensor(name) if part is None else shard.get_slice(name)[part]
            return tensor
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file.name}: {error}") from None

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self._open.clear()
        self._exits.close()

    def _shards(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            single = self.path / "model.safetensors"
            if not single.is_file():
                raise ModelError(
                    f"{self.path.name}: no model.safetensors and no model.safetensors.index.json"
                )
            return [single]
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise ModelError(f"{index.name}: weight_map is not a map of tensors to files")
        files = []
        for name in sorted(set(names.values())):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelError(f"{index.name}: {name[:80]!r} is not the name of a shard in this directory")
            if not (self.path / name).is_file():
                raise ModelError(f"{index.name}: the shard {name!r} is missing")
            files.append(self.path / name)
        return files


def _header(file: Path, max_tensors: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a file's tensors. Raises ModelError for too many, or one that exceeds the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
            raise ModelError(
                f"{file.name}: a header of {length} bytes does not fit the file's {size}, "
                f"or the {MAX_JSON_BYTES} that are read"
            )
        header = parse_json(stream.read(length), f"{file.name}: the header")
    header.pop("__metadata__", None)
    if len(header) > max_tensors:
        raise ModelError(f"{file.name}: more than {_MAX_TENSORS} tensors in all")
    return {name: _entry(file, name, entry, size - 8 - length) for name, entry in header.items()}


def _entry(file: Path, name: str, entry: Any, data_bytes: int) -> tuple[int, ...]:
    """The shape of a header's entry. Raises ModelError if dtype, shape and offsets do not fit each other."""

    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)

    if not isinstance(entry, dict) or not whole(entry.get("shape")) or not whole(entry.get("data_offsets")):
        raise ModelError(f"{file.name}: tensor {name[:80]!r} has no proper shape and offsets")
    dtype, shape, offsets = entry.get("dtype"), tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in _ITEM_BYTES:
        raise ModelError(f"{file.name}: tensor {name[:80]!r} has the unsupported dtype {str(dtype)[:20]!r}")
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        raise ModelError(
            f"{file.name}: tensor {name[:80]!r} lies at {offsets}, outside of {data_bytes} bytes"
        )
    if len(shape) > 4 or math.prod(shape) * _ITEM_BYTES[dtype] != offsets[1] - offsets[0]:
        raise ModelError(f"{file.name}: tensor {name[:80]!r} of shape {shape} does not fill {offsets}")
    return shape
