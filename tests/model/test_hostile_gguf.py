"""GGUF files of newer families that lie are refused by name, before anything large is allocated."""

from __future__ import annotations

import random
import resource
import struct
from collections import defaultdict
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.architecture.family_shared import QKV
from executor_service.backends.torch_backend.files.stored_names import place_in_gguf
from executor_service.backends.torch_backend.files.tensor_shapes import expected_shapes
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.model.gguf_models import convert
from tests.model.quantized import test_mxfp4 as mxfp4
from tests.model.tiny import save

FAMILIES = (
    "mxfp4",
    "gpt_oss",
    "olmoe",
    "qwen2_moe",
    "glm4_moe",
    "minimax_m2",
    "granitemoehybrid",
    "ministral3",
    "glm",
)
FILES_OF_EACH = 26
MAX_GROWTH_KB = 150_000
OWN = ("exps", "sinks", "inp", "shexp", "qkv", "probs")  # parts of names that only these families have
U32, F32, BOOL = "<I", "<f", "<?"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in FAMILIES:
        path = tmp_path_factory.mktemp(family)
        (mxfp4.write if family == "mxfp4" else partial(save, family))(path / "model")
        found[family] = convert(path / "model", path / "model.gguf", fused=family == "glm")
    return found


class Entry:
    """A tensor's entry in a file's header, by the places of its fields."""

    def __init__(self, data: bytearray, name: str) -> None:
        self.name = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8
        (self.dims,) = struct.unpack_from("<I", data, self.name + len(name))
        self.shape = self.name + len(name) + 4
        self.kind = self.shape + 8 * self.dims
        self.offset = self.kind + 4


def hostile(data: bytearray, name: str, rng: random.Random) -> str:
    """Change one tensor's entry; the name of the change."""
    entry = Entry(data, name)
    dim = entry.shape + 8 * rng.randrange(entry.dims)
    (size,) = struct.unpack_from("<Q", data, dim)
    changes = {
        "another name": (entry.name, b"x"),
        "one less": (dim, struct.pack("<Q", size - 1)),
        "one more": (dim, struct.pack("<Q", size + 1)),
        "twice as many": (dim, struct.pack("<Q", 2 * size)),
        "none": (dim, bytes(8)),
        "very many": (dim, struct.pack("<Q", 1 << 40)),
        "more than any": (dim, b"\xff" * 8),
        "no dimensions": (entry.shape - 4, bytes(4)),
        "many dimensions": (entry.shape - 4, struct.pack("<I", 1 << 30)),
        "wider numbers": (entry.kind, struct.pack("<I", 28)),
        "numbers that are read by nobody": (entry.kind, struct.pack("<I", 24)),  # int8
        "an unknown type": (entry.kind, struct.pack("<I", 999)),
        "bytes behind the end": (entry.offset, struct.pack("<Q", 1 << 50)),
        "bytes of another one": (entry.offset, struct.pack("<Q", 32)),
    }
    what = rng.choice(list(changes))
    at, new = changes[what]
    data[at : at + len(new)] = new
    return what


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_with_one_tensor_that_lies_is_refused_by_name_in_bounded_memory(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    rng = random.Random(f"hostile {family}")
    whole = models[family].read_bytes()
    checkpoint = open_checkpoint(models[family])
    stored = defaultdict(list)
    fused = (QKV,) if family == "glm" else ()
    for name, _ in expected_shapes(checkpoint.spec):
        stored[place_in_gguf(checkpoint.spec, name, fused).name].append(name)
    checkpoint.close()
    own = [name for name in stored if any(part in name for part in OWN)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for at in range(FILES_OF_EACH):
        data, name = bytearray(whole), rng.choice(own if own and at % 2 else list(stored))
        what = hostile(data, name, rng)
        path = tmp_path / f"{at}.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelError) as caught:
            TorchBackend(TorchConfig(path, dtype="blocks", threads=1)).load(lambda step, done: None)
        names = [name, name[1:], "share bytes", "byte ", *stored[name]]
        assert any(one in str(caught.value) for one in names), (name, what, caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KB


KEYS = [
    ("gpt_oss", "gpt-oss.expert_count", U32, 4000),
    ("gpt_oss", "gpt-oss.expert_count", U32, 0),
    ("gpt_oss", "gpt-oss.expert_count", U32, 3),
    ("gpt_oss", "gpt-oss.expert_used_count", U32, 99),
    ("gpt_oss", "gpt-oss.expert_feed_forward_length", U32, 10**9),
    ("gpt_oss", "gpt-oss.attention.head_count", U32, 2),
    ("olmoe", "olmoe.expert_count", U32, 5000),
    ("olmoe", "olmoe.feed_forward_length", U32, 1),
    ("qwen2_moe", "qwen2moe.expert_shared_feed_forward_length", U32, 49),
    ("qwen2_moe", "qwen2moe.expert_feed_forward_length", U32, 0),
    ("glm4_moe", "glm4moe.leading_dense_block_count", U32, 0),
    ("glm4_moe", "glm4moe.leading_dense_block_count", U32, 2**32 - 1),
    ("glm4_moe", "glm4moe.expert_shared_count", U32, 10**6),
    ("glm4_moe", "glm4moe.expert_gating_func", U32, 1),
    ("glm4_moe", "glm4moe.expert_group_count", U32, 2),
    ("glm4_moe", "glm4moe.expert_weights_scale", F32, -1.0),
    ("glm4_moe", "glm4moe.expert_weights_scale", F32, float("nan")),
    ("minimax_m2", "minimax-m2.expert_gating_func", U32, 3),
    ("minimax_m2", "minimax-m2.rope.dimension_count", U32, 10**6),
    ("granitemoehybrid", "granite.expert_shared_feed_forward_length", U32, 7),
    ("granitemoehybrid", "granite.rope.scaling.finetuned", BOOL, False),
    ("ministral3", "mistral3.attention.temperature_scale", F32, float("inf")),
    ("ministral3", "mistral3.rope.scaling.yarn_log_multiplier", F32, -1.0),
    ("ministral3", "mistral3.rope.scaling.original_context_length", U32, 0),
    ("glm", "chatglm.rope.dimension_count", U32, 5),
    ("glm", "chatglm.attention.head_count_kv", U32, 3),
]


@pytest.mark.parametrize(("family", "key", "code", "value"), KEYS)
def test_a_key_that_the_tensors_or_the_model_contradict_is_refused(
    family: str, key: str, code: str, value: float, models: dict[str, Path], tmp_path: Path
) -> None:
    data = bytearray(models[family].read_bytes())
    at = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    struct.pack_into(code, data, at, value)
    (tmp_path / "odd.gguf").write_bytes(data)
    with pytest.raises(ModelError, match="odd"):
        open_checkpoint(tmp_path / "odd.gguf")


@pytest.mark.parametrize("blocks", [0, 1, 3, 5, 2**32 - 1])
def test_blocks_that_draft_are_as_many_as_the_file_says_and_not_all(
    blocks: int, models: dict[str, Path], tmp_path: Path
) -> None:
    """Of fewer blocks the last ones, which draft, are no part of the model; and none may be left."""
    model = models["glm4_moe"].parent
    data = bytearray(convert(model / "model", tmp_path / "odd.gguf", drafts=1).read_bytes())
    key = b"glm4moe.block_count"
    at = data.index(key) + len(key) + 4
    assert struct.unpack_from(U32, data, at) == (4,)
    struct.pack_into(U32, data, at, blocks)
    (tmp_path / "odd.gguf").write_bytes(data)
    with pytest.raises(ModelError, match="odd"):
        open_checkpoint(tmp_path / "odd.gguf")


@pytest.mark.parametrize(
    ("family", "name", "value", "word"),
    [
        ("mxfp4", "blk.1.ffn_down_exps.weight", b"\xff", "NaN"),
        ("mxfp4", "blk.0.ffn_gate_exps.weight", b"\xff", "NaN"),
        ("gpt_oss", "blk.0.attn_sinks.weight", np.float32("nan").tobytes(), "NaN"),
        ("gpt_oss", "blk.1.ffn_up_exps.bias", np.float32("inf").tobytes(), "inf"),
        ("glm4_moe", "blk.1.exp_probs_b.bias", np.float32("nan").tobytes(), "NaN"),
        ("qwen2_moe", "blk.0.ffn_gate_inp_shexp.weight", np.float32("nan").tobytes(), "NaN"),
    ],
)
@pytest.mark.parametrize("dtype", ["blocks", "float32"])
def test_numbers_that_are_not_finite_are_refused_by_name(
    family: str, name: str, value: bytes, word: str, dtype: str, models: dict[str, Path], tmp_path: Path
) -> None:
    reader = gguf.GGUFReader(models[family])
    [tensor] = [one for one in reader.tensors if one.name == name]
    data = bytearray(models[family].read_bytes())
    data[tensor.data_offset : tensor.data_offset + len(value)] = value
    (tmp_path / "odd.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=rf"tensor '.*{word}"):
        TorchBackend(TorchConfig(tmp_path / "odd.gguf", dtype=dtype, threads=1)).load(lambda step, done: None)
