"""`SafetensorsDirectory`: the tensors of a Hugging Face model directory, read on demand.

Format: github.com/huggingface/safetensors. Each header is checked against its file's size, and its tensors
are counted, before the library reads it. A shard outside of the directory is refused.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from executor_service.backends.base import ModelError
from executor_service.files.json_file import read_json
from executor_service.files.safetensors_header import FLOATS, TensorEntry, read_entries

_MAX_TENSORS = 1 << 16  # of all shards; Qwen3-235B-A22B has 37,000


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """A tensor of one shard file."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    file: Path


class SafetensorsDirectory:
    """All tensors of `model.safetensors`, or of the shards its index names. Raises ModelError."""

    def __init__(self, path: Path, dtypes: frozenset[str] = FLOATS, title: str | None = None) -> None:
        """`title`: of a format of quantized weights."""
        self.path, self.title = path, title
        self.files = self._shards()
        self.tensors: dict[str, ShardTensor] = {}
        self._open: dict[Path, Any] = {}  # kept open, because the library reads the header at each opening
        self._exits = ExitStack()
        for file in self.files:
            for name, entry in _header(file, _MAX_TENSORS - len(self.tensors), dtypes).items():
                if name in self.tensors:
                    raise ModelError(
                        f"{file.name}: tensor {name!r} is also in {self.tensors[name].file.name}"
                    )
                self.tensors[name] = ShardTensor(entry.dtype, entry.shape, file)

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

    def read_weight(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """As `read`: no weight is quantized."""
        return self.read(name, part)

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


def _header(file: Path, max_tensors: int, dtypes: frozenset[str]) -> dict[str, TensorEntry]:
    """A file's tensors. Raises ModelError for too many, one of another dtype, or one beyond the file."""
    try:
        with file.open("rb") as stream:
            return read_entries(stream, file.stat().st_size, file.name, max_tensors, dtypes)
    except OSError as error:
        raise ModelError(f"{file.name}: {error.strerror}") from None
