"""Files of newer families that lie are refused by name, before anything large is allocated."""

from __future__ import annotations

import json
import math
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.model.quantized import test_mxfp4 as mxfp4
from tests.model.test_classification_heads import classifier
from tests.model.tiny import save
from tests.model.wrapped_models import save_wrapped

FAMILIES = [
    "mxfp4",
    "gpt_oss",
    "glm4_moe",
    "qwen2_moe",
    "minimax_m2",
    "olmoe",
    "smollm3",
    "gemma2",
    "hunyuan_v1_dense",
    "granitemoehybrid",
]
WRAPPED = ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"]
ALL = [*FAMILIES, *(f"wrapped {kind}" for kind in WRAPPED), "head"]
FILES_OF_EACH = 16
MAX_GROWTH_KB = 150_000
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family.replace(" ", "-")) / "model" for family in ALL}
    for family in FAMILIES:
        mxfp4.write(found[family]) if family == "mxfp4" else save(family, found[family])
    for kind in WRAPPED:
        save_wrapped(kind, "plain", found[f"wrapped {kind}"])
    classifier(found["qwen2_moe"], tied=False, labels=3).save_pretrained(found["head"])
    return found


def is_read(name: str) -> bool:
    """Whether it is a tensor of the text model; what is beside it is skipped."""
    return not any(part in name for part in ("vision", "visual", "projector"))


def module_of(name: str) -> str:
    """The layer in a tensor's name, or the module beside them; the rest may be the model's own name of it."""
    inner = name.removeprefix("model.language_model.").removeprefix("language_model.").removeprefix("model.")
    return ".".join(inner.split(".")[: 2 if inner.startswith("layers.") else 1])


def hostile(
    tensors: Tensors, name: str, rng: random.Random
) -> tuple[str, Callable[[dict[str, Any]], object]]:
    """Change one tensor, or return what to do with its entry in the header; with the name of the change."""
    one = tensors[name]
    row = torch.zeros_like(one[:1])
    changes: dict[str, Callable[[], torch.Tensor]] = {
        "missing": lambda: one,
        "a row less": lambda: one[1:].clone(),
        "a row more": lambda: torch.cat([one, row]),
        "flat": lambda: one.flatten()[None, None].clone(),
        "empty": lambda: one[:0].clone(),
        "of bytes": lambda: one.to(torch.int64),
    }
    entries: dict[str, Callable[[dict[str, Any]], object]] = {
        "a larger shape": lambda entry: entry["shape"].__setitem__(0, 1 << 40),
        "a negative shape": lambda entry: entry["shape"].__setitem__(0, -1),
        "no numbers in its shape": lambda entry: entry.update(shape="all"),
        "bytes behind the end": lambda entry: entry.update(data_offsets=[0, 1 << 60]),
        "bytes that end before they begin": lambda entry: entry.update(data_offsets=[64, 0]),
        "an unknown dtype": lambda entry: entry.update(dtype="Q3"),
        "no offsets": lambda entry: entry.pop("data_offsets"),
    }
    kind = rng.choice([*changes, *entries])
    if kind in entries:
        return kind, entries[kind]
    if kind == "missing":
        del tensors[name]
    else:
        tensors[name] = changes[kind]()
    return kind, lambda entry: None


def written(
    model: Path, to: Path, tensors: Tensors, name: str, change: Callable[[dict[str, Any]], object]
) -> None:
    to.mkdir()
    (to / "config.json").write_bytes((model / "config.json").read_bytes())
    file = to / "model.safetensors"
    save_file(tensors, file)
    data = file.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    if name in header:
        change(header[name])
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + size :])


@pytest.mark.parametrize("family", ALL)
def test_a_file_with_one_tensor_that_lies_is_refused_by_name_in_bounded_memory(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    rng = random.Random(f"hostile {family}")
    whole = load_file(models[family] / "model.safetensors")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    odd = [
        name
        for name in whole
        if is_read(name) and any(part in name for part in ("layers.0", "sinks", "experts", "gate", "score"))
    ]
    read = [name for name in whole if is_read(name)]
    for at in range(FILES_OF_EACH):
        tensors = dict(whole)
        name = rng.choice(odd if at % 2 else read)
        kind, change = hostile(tensors, name, rng)
        path = tmp_path / str(at)
        written(models[family], path, tensors, name, change)
        with pytest.raises(ModelError) as caught:
            open_checkpoint(path)
        assert module_of(name) in str(caught.value) or "model.safetensors" in str(caught.value), (name, kind)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KB


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_oss", {"num_local_experts": 4000}),
        ("gpt_oss", {"num_local_experts": 10**12}),
        ("glm4_moe", {"n_routed_experts": 5}),
        ("glm4_moe", {"n_shared_experts": 10**6}),
        ("glm4_moe", {"first_k_dense_replace": 0}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 49}),
        ("qwen2_moe", {"num_experts_per_tok": 9}),
        ("minimax_m2", {"num_local_experts": 3}),
        ("smollm3", {"no_rope_layers": [1]}),
        ("wrapped gemma3", {"layer_types": ["sliding_attention"]}),
        ("wrapped mistral3", {"num_hidden_layers": 10**9}),
        ("wrapped qwen2_5_vl", {"num_key_value_heads": 10**12}),
        ("wrapped qwen3_vl", {"head_dim": 1 << 40}),
        ("olmoe", {"num_experts": 10**9}),
        ("hunyuan_v1_dense", {"intermediate_size": 10**12}),
        ("head", {"num_experts": 3}),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3}),
        ("granitemoehybrid", {"num_local_experts": 4}),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}),
        ("granitemoehybrid", {"shared_intermediate_size": 10**9}),
    ],
)
def test_sizes_that_the_files_do_not_have_are_refused_by_name(
    family: str, changes: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((models[family] / "config.json").read_text())
    config.get("text_config", config).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(models[family] / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_checkpoint(tmp_path)
    words = str(caught.value)
    assert any(field in words for field in changes) or "experts" in words or "mlp" in words, words


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe", "minimax_m2"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(
    family: str, value: float, models: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(models[family] / "model.safetensors")
    ends = ("self_attn.sinks", "e_score_correction_bias", "down_proj_bias")
    name = next(name for name in tensors if name.endswith(ends) and "layers.1." in name)
    tensors[name].view(-1)[-1] = value
    written(models[family], tmp_path / "odd", tensors, name, lambda entry: None)
    with pytest.raises(ModelError, match=name.split(".")[-1].removesuffix("_bias")):
        TorchBackend(TorchConfig(tmp_path / "odd", threads=1)).load(lambda what, done: None)
