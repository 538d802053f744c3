"""Weights that can't be computed with are refused when they are read, by the name of their tensor."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from tests.unit.executor.model_files import change_tensors, refuses, write_gguf, write_model

NAMES = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
]


_BAD = ((math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "inf"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return tmp_path / "model"


_PROJECTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "value", "word", "dtype"),
    [
        *((name, math.nan, "NaN", "float32") for name in NAMES),
        *((name, math.inf, "inf", "bfloat16") for name in NAMES),
        *((_PROJECTION, value, "inf", "float32") for value in (math.inf, -math.inf)),
        *((_PROJECTION, value, word, dtype) for dtype in ("int8", "fp8") for value, word in _BAD),
    ],
)
def test_a_weight_that_is_not_finite_is_refused_by_name(
    model: Path, name: str, value: float, word: str, dtype: str
) -> None:
    change_tensors(model, lambda tensors: tensors[name].view(-1)[-3:-2].fill_(value))
    refuses(model, name, word, dtype=dtype)


def test_a_weight_that_overflows_the_dtype_of_the_arithmetic_is_refused_by_name(model: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(model, lambda tensors: tensors[name].view(-1)[:1].fill_(70_000))
    refuses(model, name, "70000", "float16", dtype="float16")
    backend = TorchBackend(TorchConfig(model))
    backend.load(lambda what, done: None)
    backend.close()

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].double()
        tensors[name][0, 0] = 1e300

    change_tensors(model, widen)
    refuses(model, name, "float32")


def test_a_quantized_block_whose_scale_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, quantized=gguf.GGMLQuantizationType.Q8_0)
    backend = TorchBackend(TorchConfig(file))
    backend.load(lambda what, done: None)
    backend.close()
    [place] = [t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.ffn_up.weight"]
    raw = bytearray(file.read_bytes())
    raw[place.data_offset : place.data_offset + 2] = np.float16("nan").tobytes()
    file.write_bytes(raw)
    refuses(file, "model.layers.1.mlp.up_proj.weight", "NaN")


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_rotary_factors_that_nothing_can_be_divided_by_are_refused(tmp_path: Path, factor: float) -> None:
    write_gguf(tmp_path / "tiny.gguf", rope_factors={"rope_freqs.weight": [1.0, 2.0, factor, 4.0]})
    refuses(tmp_path / "tiny.gguf", "rotary factors")
