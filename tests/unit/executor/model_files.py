"""Tiny models on disk, good ones and those made wrong from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.architecture.config_json import spec_from_config
from executor_service.backends.torch_backend.files.stored_names import place_in_gguf
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 3],
}


def write_config(path: Path, **changes: Any) -> None:
    config = {k: v for k, v in (CONFIG | changes).items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))


def write_model(path: Path, **changes: Any) -> None:
    path.mkdir(exist_ok=True)
    write_config(path, **changes)
    torch.manual_seed(0)
    shapes = expected_shapes(spec_from_config(CONFIG | changes, {}, "config.json"))
    save_file({name: torch.randn(shape) for name, shape in shapes}, path / "model.safetensors")


def refuses(path: Path, *words: str, dtype: str = "float32") -> None:
    with pytest.raises(ModelError) as caught:
        TorchBackend(TorchConfig(path, dtype=dtype)).load(lambda what, done: None)
    for word in words:
        assert word in str(caught.value)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    changed = json.dumps(change(header) or header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + length :])


def write_gguf(
    path: Path,
    kind: str = "llama",
    keys: Mapping[str, float | bool | str] | None = None,
    tensors: Sequence[str] = (),
    quantized: gguf.GGMLQuantizationType | None = None,
    rope_factors: Mapping[str, Sequence[float]] | None = None,
    split: int = 0,
    **changes: Any,
) -> None:
    """The same tiny model as GGUF, through the format's own library, with keys and tensors of one's own.

    split: most tensors of a part, of which there are 20; 0: it is one file.
    """
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=split)
    hidden = 16 if quantized is None else 32  # whole blocks
    sizes = {"vocab": 32, "context": 64, "hidden": hidden, "inner": 24, "layers": 2} | changes
    writer.add_vocab_size(sizes["vocab"])
    writer.add_context_length(sizes["context"])
    writer.add_embedding_length(sizes["hidden"])
    writer.add_feed_forward_length(sizes["inner"])
    writer.add_block_count(sizes["layers"])
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    rng = np.random.default_rng(0)
    config = CONFIG | {"hidden_size": hidden}
    spec = spec_from_config(config, {}, "")
    for name, shape in expected_shapes(spec):
        stored = place_in_gguf(spec, name).name
        values = rng.standard_normal(shape).astype(np.float32)
        if quantized is not None and len(shape) > 1 and shape[-1] % 32 == 0:
            writer.add_tensor(stored, gguf.quants.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(stored, values)
    for name, factors in (rope_factors or {}).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    for name in tensors:
        writer.add_tensor(name, np.ones(16, np.float32))
    for key, value in (keys or {}).items():
        match value:
            case bool():
                writer.add_bool(f"{kind}.{key}", value)
            case int():
                writer.add_uint32(f"{kind}.{key}", value)
            case float():
                writer.add_float32(f"{kind}.{key}", value)
            case _:
                writer.add_string(f"{kind}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite a directory's safetensors with other tensors."""
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
