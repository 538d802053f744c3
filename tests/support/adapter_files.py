"""Adapters as PEFT writes them, of random weights; without torch, and without the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PREFIX = "base_model.model.model.layers."
QUERIES_AND_VALUES = {(0, "self_attn.q_proj"): (128, 256), (0, "self_attn.v_proj"): (128, 128)}
"""(layer, path): (inputs, outputs), as they fit the paged-attention backend."""


def config(**changes: Any) -> dict[str, Any]:
    """An adapter_config.json; a value of `...` leaves a key out."""
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/else",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["q_proj", "v_proj"],
        "peft_version": "0.18.0",
    } | changes
    return {key: value for key, value in values.items() if value is not ...}


def factors(
    linears: Mapping[tuple[int, str], tuple[int, int]] = QUERIES_AND_VALUES,
    rank: int = 4,
    seed: int = 0,
    gain: float = 1.0,
) -> dict[str, np.ndarray]:
    """Both factors of each linear layer, by the names that PEFT gives them."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for (layer, path), (inputs, outputs) in linears.items():
        for name, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            values = rng.standard_normal(shape) * gain
            tensors[f"{PREFIX}{layer}.{path}.{name}.weight"] = values.astype(np.float32)
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file; arrays of uint16 are bfloat16."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_adapter(
    directory: Path, tensors: Mapping[str, np.ndarray] | None = None, seed: int = 0, **changes: Any
) -> Path:
    """A directory with config and weights; `changes` of the config. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config(**changes)))
    write_tensors(directory / "adapter_model.safetensors", factors(seed=seed) if tensors is None else tensors)
    return directory
