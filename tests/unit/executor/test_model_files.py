"""Files that can't be used, hostile ones too, are refused by name before anything is allocated."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.unit.executor.model_files import refuses, rewrite_header, write_config, write_gguf, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return tmp_path / "model"


def test_a_good_model_loads(model: Path) -> None:
    backend = TorchBackend(TorchConfig(model))
    backend.load(lambda what, done: None)
    assert backend.info.eos_token_ids == (2, 3)
    assert backend.info.parameters == sum(
        np.prod(shape) for _, shape in expected_shapes(open_checkpoint(model).spec)
    )
    assert backend.info.has_tokenizer is False
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        backend.tokenizer()


def test_the_fingerprint_follows_weights_config_and_nothing_else(model: Path) -> None:
    def fingerprint() -> bytes:
        backend = TorchBackend(TorchConfig(model))
        backend.load(lambda what, done: None)
        return backend.info.fingerprint

    first = fingerprint()
    (model / "README.md").write_text("words")
    assert fingerprint() == first
    write_config(model, rms_norm_eps=1e-6)
    second = fingerprint()
    raw = bytearray((model / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (model / "model.safetensors").write_bytes(raw)
    assert len({first, second, fingerprint()}) == 3


def test_places_without_a_model(tmp_path: Path) -> None:
    refuses(tmp_path / "nothing", "no such file")
    refuses(tmp_path, "config.json is missing")
    (tmp_path / "x.bin").write_bytes(b"hello")
    refuses(tmp_path / "x.bin", "x.bin", "neither")
    (tmp_path / "empty.gguf").write_bytes(b"")
    refuses(tmp_path / "empty.gguf", "empty.gguf")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": 2**60}, "hidden_size"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"vocab_size": 64}, "model.embed_tokens.weight"),
        ({"vocab_size": None}, "expected (32000, 16)"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 7}, "odd"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, "factor"),
        ({"rope_scaling": [1]}, "rope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"tie_word_embeddings": False}, "lm_head.weight"),
        ({"eos_token_id": 32}, "eos"),
        ({"eos_token_id": "two"}, "eos_token_id"),
    ],
)
def test_configs_that_do_not_fit(model: Path, changes: dict[str, Any], word: str) -> None:
    write_config(model, **changes)
    refuses(model, word)


def test_a_sliding_window_that_is_not_in_use_is_no_fault(model: Path) -> None:
    write_config(model, sliding_window=8, use_sliding_window=False)
    open_checkpoint(model).close()


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff\xfe", "[" * 100_000])
def test_config_that_is_not_a_json_object(model: Path, text: str) -> None:
    (model / "config.json").write_bytes(text.encode("latin-1"))
    refuses(model, "config.json")


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 10**6])
def test_safetensors_header_longer_than_the_file(model: Path, length: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    refuses(model, "model.safetensors", str(length))


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_safetensors_truncated_anywhere(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuses(model, "model.safetensors")


NAME = "model.norm.weight"


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [16], "data_offsets": [0, 2**62]},
        {"dtype": "F32", "shape": [16], "data_offsets": [64, 0]},
        {"dtype": "F32", "shape": [16], "data_offsets": [-64, 0]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [17], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "I8", "shape": [16], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "16", "data_offsets": [0, 64]},
        {"dtype": "F32"},
        None,
        7,
    ],
)
def test_safetensors_with_lying_headers(model: Path, entry: Any) -> None:
    rewrite_header(model / "model.safetensors", lambda header: header | {NAME: entry})
    refuses(model, NAME)


def test_safetensors_without_a_tensor(model: Path) -> None:
    rewrite_header(model / "model.safetensors", lambda header: {k: v for k, v in header.items() if k != NAME})
    refuses(model, NAME)


def test_shards(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    shutil.move(model / "model.safetensors", model / "model-1.safetensors")
    refuses(model, "no model.safetensors")
    index.write_text(json.dumps({"weight_map": {NAME: "model-1.safetensors"}}))
    open_checkpoint(model).close()
    index.write_text(json.dumps({"weight_map": {NAME: "model-1.safetensors", "x": "model-2.safetensors"}}))
    refuses(model, "model-2.safetensors", "missing")
    shutil.copy(model / "model-1.safetensors", model / "model-2.safetensors")
    refuses(model, "also in")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", 7])
def test_an_index_never_leaves_the_directory(model: Path, name: Any) -> None:
    index = model / "model.safetensors.index.json"
    shutil.copy(model / "model.safetensors", model.parent / "model.safetensors")
    index.write_text(json.dumps({"weight_map": {NAME: name}}))
    refuses(model, "index.json")


@pytest.fixture
def gguf_model(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_a_good_gguf_loads_and_has_no_tokenizer(gguf_model: Path) -> None:
    backend = TorchBackend(TorchConfig(gguf_model))
    backend.load(lambda what, done: None)
    assert backend.info.architecture == "llama"
    assert backend.info.has_tokenizer is False
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model is missing"):
        backend.tokenizer()


def test_gguf_truncated_anywhere(gguf_model: Path) -> None:
    raw = gguf_model.read_bytes()
    for keep in [*range(4, 1200, 13), len(raw) // 2, len(raw) - 65]:
        gguf_model.write_bytes(raw[:keep])
        refuses(gguf_model, "tiny.gguf")


@pytest.mark.parametrize(
    ("kind", "changes", "word"),
    [
        ("gemma", {}, "gemma"),
        ("llama", {"hidden": 1 << 30}, "embedding_length"),
        ("llama", {"layers": 3}, "model.layers.2"),
        ("llama", {"vocab": 64}, "model.embed_tokens.weight"),
        ("llama", {"context": 0}, "context_length"),
        ("qwen3", {}, "q_norm"),
    ],
)
def test_gguf_whose_metadata_do_not_fit(
    tmp_path: Path, kind: str, changes: dict[str, Any], word: str
) -> None:
    write_gguf(tmp_path / "odd.gguf", kind, **changes)
    refuses(tmp_path / "odd.gguf", word)


@pytest.mark.parametrize("value", [2**60, 2**63 + 1, 2**64 - 1, 2**32])
def test_gguf_with_lying_counts(gguf_model: Path, value: int) -> None:
    raw = gguf_model.read_bytes()
    for at in (8, 16, 24):  # tensors, metadata entries, the first key's length
        gguf_model.write_bytes(raw[:at] + struct.pack("<Q", value) + raw[at + 8 :])
        refuses(gguf_model, "tiny.gguf")


@pytest.mark.parametrize("field", ["shape", "kind", "offset"])
def test_gguf_with_lying_tensors(gguf_model: Path, field: str) -> None:
    raw = bytearray(gguf_model.read_bytes())
    at = raw.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    place = {"shape": at, "kind": at + 16, "offset": at + 20}[field]
    struct.pack_into("<Q" if field != "kind" else "<I", raw, place, 2**61 if field != "kind" else 99)
    gguf_model.write_bytes(raw)
    refuses(gguf_model, "token_embd.weight")


@pytest.mark.parametrize("back", [1, 32])
def test_gguf_tensors_that_share_bytes_are_refused_by_name(gguf_model: Path, back: int) -> None:
    raw = bytearray(gguf_model.read_bytes())
    name = b"blk.0.attn_norm.weight"  # of one dimension
    at = raw.index(name) + len(name) + 16
    struct.pack_into("<Q", raw, at, struct.unpack_from("<Q", raw, at)[0] - back)
    gguf_model.write_bytes(raw)
    refuses(gguf_model, "blk.0.attn_norm.weight' share bytes")


def test_gguf_survives_a_flip_of_any_header_bit(gguf_model: Path) -> None:
    raw = gguf_model.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(4, 1500, 300):
        changed = bytearray(raw)
        changed[at] ^= 1 << int(rng.integers(8))
        gguf_model.write_bytes(changed)
        with contextlib.suppress(ModelError):  # refused or not, nothing else may come out
            open_checkpoint(gguf_model).close()
