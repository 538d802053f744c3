"""Reads an adapter from a directory as PEFT writes it: adapter_config.json and adapter_model.safetensors.

Nothing is trusted: sizes are checked before they are allocated, names, shapes and dtypes before the factors
are read, and every value is finite. The file is read once, into memory of our own, so that what is used
is what was checked. Pickles are never read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from executor_service.adapters.inside import find_directory, open_file
from executor_service.adapters.peft_config import CONFIG, MAX_MATCHES, PeftConfig, is_target, read_config
from executor_service.adapters.weights import (
    PARENTS,
    AdapterTarget,
    AdapterWeights,
    Factor,
    LinearKey,
    LowRankChange,
    make_weights,
    padded,
    scaled,
)
from executor_service.contract.model_error import ModelError
from executor_service.files.json_file import parse_json
from executor_service.files.safetensors_header import TensorEntry, read_entries

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

_MAX_CONFIG_BYTES = 1 << 20
_MAX_TENSORS = 2 * len(PARENTS) * 1024  # of 1,024 layers
_PIECE_BYTES = 8 << 20  # between two looks whether the load is still wanted
_STORED: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,4})\.(self_attn|mlp)\.(\w+)\.lora_([AB])\.weight",
    re.ASCII,
)
_NAMED_FAULTS = (  # what tensors of other kinds of adapters have in their names
    ("lora_magnitude_vector", "DoRA is not supported"),
    (".experts.", "adapters of experts are not supported"),
    ("embed_tokens", "adapters of the embedding are not supported"),
    ("lora_embedding", "adapters of the embedding are not supported"),
    ("lm_head", "adapters of the output layer are not supported"),
    ("modules_to_save", "modules_to_save is not supported"),
    ("bias", "biases are not supported"),
)


class LoadStopped(Exception):
    """Nobody waits for the adapter any more."""


@dataclass(frozen=True, slots=True)
class AdapterBounds:
    """What may be read."""

    max_rank: int
    max_bytes: int


def read_adapter(
    root: Path,
    path: str,
    target: AdapterTarget,
    model_fingerprint: bytes,
    bounds: AdapterBounds,
    admit: Callable[[int], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> AdapterWeights:
    """The adapter in directory `path` below `root`.

    `admit` gets the bytes of memory that it will take before anything of it is allocated, and may raise.
    Raises PathRefused, NoSuchAdapter, ModelError if it can't be used; LoadStopped soon after `stop` is true.
    """
    directory = find_directory(root, path)
    config = read_config(_read_json(root, directory / CONFIG), bounds.max_rank)
    if not (directory / WEIGHTS).exists() and (directory / PICKLE).exists():
        raise ModelError(f"{PICKLE} is a pickle, which can execute code: only {WEIGHTS} is read")
    stream, size = open_file(root, directory / WEIGHTS)
    with stream:
        if size > bounds.max_bytes:
            raise ModelError(f"{WEIGHTS}: {size} bytes, at most {bounds.max_bytes} (max_adapter_bytes)")
        entries = read_entries(stream, size, WEIGHTS, _MAX_TENSORS)
        pairs = _pairs(entries)
        _check_modules(pairs.keys(), config, target)
        if (len(config.ranks) + len(config.alphas)) * len(pairs) > MAX_MATCHES:
            raise ModelError(f"{CONFIG}: rank_pattern and alpha_pattern: too many for {len(pairs)} layers")
        ranks = {key: config.rank_of(*key) for key in pairs}
        for (layer, module), (a, b) in pairs.items():
            _check_shapes(layer, module, a, b, ranks[layer, module], target)
        scales = {key: config.scale_of(*key, own_rank) for key, own_rank in ranks.items()}
        # One rank and one scale for all: lower ranks get zeros, and the rest of a scale is in the factor.
        rank, scale = max(ranks.values()), scales[min(pairs)]
        factors = {key: own / scale for key, own in scales.items()}
        held = sum(_held(a, b, rank, factors[key]) for key, (a, b) in pairs.items())
        admit(target.held_bytes(rank, pairs.keys(), held))
        changes = []
        for (layer, module), (a, b) in pairs.items():
            where = f"{module} in layer {layer}"
            down = _read(stream, a, where, stop)
            up = scaled(_read(stream, b, where, stop), factors[layer, module])
            if up.dtype == np.float32 and not np.isfinite(up).all():
                raise ModelError(f"{CONFIG}: alpha_pattern: the scale of {where} is too large")
            changes.append(LowRankChange(layer, module, padded(down, rank, 0), padded(up, rank, 1)))
    return make_weights(rank, scale, changes, model_fingerprint)


def _held(a: TensorEntry, b: TensorEntry, rank: int, factor: float) -> int:
    """Bytes of both factors with this rank, the second one multiplied."""
    size = _STORED[a.dtype].itemsize
    return rank * (a.shape[1] * size + b.shape[0] * (4 if factor != 1 else _STORED[b.dtype].itemsize))


def _read_json(root: Path, path: Path) -> dict[str, object]:
    stream, size = open_file(root, path)
    with stream:
        if size > _MAX_CONFIG_BYTES:
            raise ModelError(f"{path.name}: {size} bytes, at most {_MAX_CONFIG_BYTES} are read")
        return parse_json(stream.read(size), path.name)


def _pairs(entries: Mapping[str, TensorEntry]) -> dict[LinearKey, tuple[TensorEntry, TensorEntry]]:
    """Both factors of each linear layer, in the order of the file. Raises ModelError."""
    found: dict[LinearKey, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        match = _TENSOR.fullmatch(name)
        if match is None or PARENTS.get(match[3]) != match[2]:
            _refuse_tensor(name)
        if entry.dtype not in _STORED:
            raise ModelError(f"{WEIGHTS}: tensor {name[:120]!r} has the unsupported dtype {entry.dtype}")
        found.setdefault((int(match[1]), match[3]), {})[match[4]] = entry
    if not found:
        raise ModelError(f"{WEIGHTS}: no tensors")
    for (layer, module), factors in found.items():
        for factor in "AB":
            if factor not in factors:
                raise ModelError(f"{WEIGHTS}: lora_{factor} of {module} in layer {layer} is missing")
    return {key: (factors["A"], factors["B"]) for key, factors in found.items()}


def _refuse_tensor(name: str) -> NoReturn:
    why = next((why for part, why in _NAMED_FAULTS if part in name), "no factor of a supported linear layer")
    raise ModelError(f"{WEIGHTS}: tensor {name[:120]!r}: {why}")


def _check_modules(found: Iterable[LinearKey], config: PeftConfig, target: AdapterTarget) -> None:
    """Raises ModelError unless the tensors are those of the layers that config and model say."""
    present = set(found)
    for layer, module in sorted(present):
        if not config.covers(layer, module):
            raise ModelError(f"{WEIGHTS}: {module} in layer {layer} is not among {CONFIG}'s target_modules")
    if target.linears is None:
        return
    layers = 1 + max(layer for layer, _ in target.linears)
    for layer, module in sorted(present - target.linears.keys()):
        why = f"the model has layers 0 to {layers - 1}" if layer >= layers else "the model has no such layer"
        raise ModelError(f"{WEIGHTS}: {module} in layer {layer}: {why}")
    for name in config.targets or ():
        if not any(is_target(layer, module, name) for layer, module in target.linears):
            raise ModelError(f"{CONFIG}: target_modules: {name[:80]!r} is in no layer of the model")
    if config.targets is not None:
        wanted = {(layer, module) for layer, module in target.linears if config.covers(layer, module)}
        for layer, module in sorted(wanted - present):
            raise ModelError(f"{WEIGHTS}: {module} in layer {layer} is missing")


def _check_shapes(
    layer: int, module: str, a: TensorEntry, b: TensorEntry, rank: int, target: AdapterTarget
) -> None:
    """Raises ModelError unless the factors fit the rank, each other, and the model's linear layer."""
    where = f"{WEIGHTS}: {module} in layer {layer}"
    shapes = a.shape, b.shape
    if any(len(shape) != 2 or 0 in shape for shape in shapes) or (a.shape[0], b.shape[1]) != (rank, rank):
        raise ModelError(
            f"{where}: lora_A {list(a.shape)} and lora_B {list(b.shape)} are not [{rank}, inputs] and "
            f"[outputs, {rank}]"
        )
    if target.linears is None:
        return
    inputs, outputs = target.linears[layer, module]
    if (a.shape[1], b.shape[0]) != (inputs, outputs):
        raise ModelError(
            f"{where}: changes a weight of {a.shape[1]} inputs and {b.shape[0]} outputs, the model's has "
            f"{inputs} and {outputs}: an adapter of another model"
        )


def _read(stream: BinaryIO, entry: TensorEntry, where: str, stop: Callable[[], bool]) -> Factor:
    """One factor, in memory of its own. Raises LoadStopped, and ModelError if a value is not finite."""
    data = np.empty(entry.end - entry.begin, np.uint8)
    view = data.data
    stream.seek(entry.begin)
    done = 0
    while done < len(data):
        if stop():
            raise LoadStopped
        count = os.readv(stream.fileno(), [view[done : done + _PIECE_BYTES]])
        if not count:
            raise ModelError(f"{WEIGHTS}: shorter than it was")
        done += count
    factor: Factor = data.view(_STORED[entry.dtype])
    finite = (factor & 0x7F80) != 0x7F80 if entry.dtype == "BF16" else np.isfinite(factor)
    if not finite.all():
        raise ModelError(f"{WEIGHTS}: {where} has values that are NaN or infinite")
    return factor.reshape(entry.shape)
