"""`Checkpoint`: a model's spec and weights under one set of names, from a directory or a GGUF file.

Names and shapes are Hugging Face's. When a checkpoint is opened, the name and shape of every tensor of the
spec are checked, from the files' headers alone: nothing is allocated for a model that cannot be used. A
tensor that the spec does not have is refused as well: in a GGUF file any, in a directory those of the head
and the layers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from service_kit.logs import Log
from service_kit.model_name import model_name

from executor_service.backends.base import ModelError, Progress
from executor_service.backends.torch_backend.files.architecture.config_json import (
    labels_from_config,
    spec_from_config,
)
from executor_service.backends.torch_backend.files.architecture.config_wrappers import (
    WRAPPERS,
    modules_beside,
    text_names,
)
from executor_service.backends.torch_backend.files.architecture.families import FAMILIES
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.checkpoints.formats import TensorDirectory, open_directory
from executor_service.backends.torch_backend.files.gguf_checkpoint import GgufCheckpoint
from executor_service.backends.torch_backend.files.gguf_file import MAGIC
from executor_service.backends.torch_backend.files.packed_experts import PackedExperts
from executor_service.backends.torch_backend.files.scaled_numbers import Weight, plain
from executor_service.backends.torch_backend.files.shape_fields import by_fields
from executor_service.backends.torch_backend.files.stored_names import (
    CLASSIFIER,
    EMBEDDING,
    HEAD,
    Place,
    halves_first,
    is_rotated,
    place_in_directory,
)
from executor_service.backends.torch_backend.files.tensor_shapes import (
    Part,
    Shapes,
    check_shape,
    check_shapes,
    expected_shapes,
    unused,
)
from executor_service.files.json_file import read_json

_STACK, _STACK_PARTS = "model.", ("embed_tokens.", "layers.", "norm.")  # all but the output layer
_COMPARED_ROWS = 4096  # of two matrices, read at once

log = Log(__name__)


class Checkpoint(Protocol):
    """Weights on disk."""

    name: str
    spec: ModelSpec

    @property
    def quantization(self) -> str | None:
        """The title of the format of its quantized weights; None: `read_weight` returns tensors only."""

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """A tensor or a part of it, by its Hugging Face name: in its stored dtype, or dequantized to fp32."""

    def read_weight(self, name: str, part: Part | None = None) -> Weight:
        """As `read`, of a linear layer's weight: as numbers and scales where it is stored so."""

    def files(self) -> list[Path]:
        """The files that hold the weights, in a fixed order."""

    def close(self) -> None:
        """Close the files."""


def open_checkpoint(path: Path, *, blocks: bool = False) -> Checkpoint:
    """Open a directory or a GGUF file and check it; `blocks`: `GgufCheckpoint`'s. Raises ModelError."""
    try:
        if path.is_dir():
            return DirectoryCheckpoint(path)
        if path.is_file():
            with path.open("rb") as file:
                if file.read(4) == MAGIC:
                    return GgufCheckpoint(path, blocks=blocks)
            raise ModelError(f"{path.name}: neither a GGUF file nor a model directory")
    except OSError as error:
        raise ModelError(f"{Path(error.filename or path).name}: {error.strerror}") from None
    raise ModelError(f"{path}: no such file or directory")


def fingerprint(checkpoint: Checkpoint, dtypes: Sequence[str], progress: Progress) -> bytes:
    """SHA-256 of the weights' files, their format, the spec and the dtypes of the arithmetic."""
    digest = hashlib.sha256()
    files = checkpoint.files()
    total = max(sum(file.stat().st_size for file in files), 1)
    done = 0
    for path in files:
        with path.open("rb") as stream:
            while chunk := stream.read(4 << 20):
                digest.update(chunk)
                done += len(chunk)
                progress("fingerprinting weights", done / total)
    spec = dataclasses.asdict(checkpoint.spec)
    formats = [*dtypes] if checkpoint.quantization is None else [*dtypes, checkpoint.quantization]
    digest.update(json.dumps([spec, *formats], sort_keys=True, default=sorted).encode())
    return digest.digest()


class DirectoryCheckpoint:
    """A Hugging Face directory: config.json and safetensors files.

    `tie_word_embeddings` means what it does in transformers: if the file has different tensors for embedding
    and head, both are used, and one of the two may be missing. A model that was saved without its output
    layer (Qwen3-Embedding) has names without "model.". `score.weight` in its place makes it one for sequence
    classification.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: not a model directory: config.json is missing")
        generation = path / "generation_config.json"
        self.name = model_name(path)
        config = read_json(path / "config.json")
        self.spec = spec_from_config(
            config, read_json(generation) if generation.exists() else {}, "config.json"
        )
        store = open_directory(path, config, "config.json")
        self._store: TensorDirectory | PackedExperts = store
        moe = self.spec.moe
        if moe is not None and moe.clamped:
            self._store = PackedExperts(store, moe.experts)
        self.quantization = self._store.title
        self._stored = _model_names(config, self._store.tensors, self.name)
        self._places: dict[str, Place] = {}  # of tensors that are stored under other names
        try:
            if CLASSIFIER in self._stored:
                labels = labels_from_config(config, "config.json")
                self.spec = dataclasses.replace(self.spec, labels=labels, tied_embeddings=True)
            self._check()  # an OSError of reading comes as a ModelError
        except ModelError:
            self.close()
            raise

    def _found(self) -> Shapes:
        """The shapes of all tensors in the files, of the model's own by its names. Raises ModelError."""
        found: Shapes = {name: self._store.tensors[stored].shape for name, stored in self._stored.items()}
        parts: Shapes = {}
        for name, _ in expected_shapes(self.spec):
            place = place_in_directory(self.spec, name)
            if place.name != name:
                if place.name not in found:
                    check_shape(place.name, (), found, self.name)
                shape = found[place.name]
                if place.rows is not None:
                    expected = place.all_rows, *shape[1:]
                    check_shape(place.name, expected, found, self.name)
                    shape = place.rows.stop - place.rows.start, *shape[1:]
                parts[name], self._places[name] = shape, place
        for place in self._places.values():
            found.pop(place.name, None)
        return found | parts

    def _check(self) -> None:
        found = self._found()
        if CLASSIFIER in found and HEAD in found:
            raise ModelError(f"{self.name}: {CLASSIFIER!r} and {HEAD!r}: a model has one of both heads")
        if self.spec.tied_embeddings and EMBEDDING in found and HEAD in found:
            untied = dataclasses.replace(self.spec, tied_embeddings=False)
            check_shapes(untied, found, self.name)
            if not self._equal(EMBEDDING, HEAD):
                log.warning("tie_word_embeddings is set, but lm_head.weight is another tensor: not tied")
                self.spec = untied
        elif self.spec.tied_embeddings and HEAD in found:
            found[EMBEDDING] = found[HEAD]
        check_shapes(self.spec, found, self.name)
        for name in unused(self.spec, found):
            # GPTQ-for-LLaMa and its successors write biases for linear layers that have none.
            of_layer = name.endswith(".bias") and name.removesuffix("bias") + "weight" in found
            if not (of_layer and not self.read(name).any()):
                raise ModelError(
                    f"{self.name}: tensor {name!r} is in the file, but config.json has no use for it"
                    + by_fields(name)
                )

    def _equal(self, one: str, other: str) -> bool:
        """Whether two matrices [vocabulary, hidden] are equal; reads some rows at a time."""
        pieces = (slice(i, i + _COMPARED_ROWS) for i in range(0, self.spec.vocab_size, _COMPARED_ROWS))
        return all(
            torch.equal(self.read(one, (rows,)).float(), self.read(other, (rows,)).float()) for rows in pieces
        )

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        return plain(self._ordered(name, self._store.read(*self._stored_part(name, part))))

    def read_weight(self, name: str, part: Part | None = None) -> Weight:
        return self._ordered(name, self._store.read_weight(*self._stored_part(name, part)))

    def _ordered(self, name: str, weight: Weight) -> Weight:
        """Rows, of whole heads, in the order in which they are rotated."""
        if FAMILIES[self.spec.architecture].pairs and is_rotated(name):
            return halves_first(weight, self.spec.head_dim, self.spec.rotary_dim)
        return weight

    def _stored_part(self, name: str, part: Part | None) -> tuple[str, Part | None]:
        """The stored tensor that has this part of one of the model's, and the part of it."""
        place = self._places.get(name, Place(name))
        stored = self._stored.get(place.name)
        within = _within(place.rows, part)
        return HEAD if stored is None and name == EMBEDDING else stored or name, within

    def files(self) -> list[Path]:
        return self._store.files

    def close(self) -> None:
        self._store.close()


def _within(rows: slice | None, part: Part | None) -> Part | None:
    """A part of some rows of a tensor, as a part of the tensor."""
    if rows is None:
        return part
    first, *rest = part or (slice(None),)
    begin, end, _ = first.indices(rows.stop - rows.start)
    return slice(rows.start + begin, rows.start + end), *rest


def _model_names(config: Mapping[str, Any], stored: Collection[str], where: str) -> dict[str, str]:
    """The stored names of a directory's tensors, by their names in a text model with an output layer."""
    if config.get("model_type") in WRAPPERS:
        names = text_names(stored, where)
        if beside := modules_beside(stored, names):
            log.info("texts only: what reads images is not loaded", skipped=", ".join(beside))
        return names
    if EMBEDDING.removeprefix(_STACK) not in stored or EMBEDDING in stored:
        return {name: name for name in stored}
    return {_STACK + name if name.startswith(_STACK_PARTS) else name: name for name in stored}
