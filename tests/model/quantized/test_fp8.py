"""fp8 checkpoints: per tensor, per row and in blocks; equal to their dequantization, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_service.backends.base import ModelError
from tests.model.quantized.written import (
    Matrix,
    Tensors,
    assert_equal,
    change_quantization,
    change_tensors,
    copied,
    loaded,
    refused,
    set_config,
    write,
)

CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
MODULE = "model.layers.1.self_attn.k_proj"


def in_blocks(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    """A scale for each block of a weight, as DeepSeek and Qwen write it."""

    def quantize(rng: np.random.Generator, weight: Matrix) -> tuple[Tensors, Matrix]:
        n, k = weight.shape
        scales = torch.empty(-(-n // rows), -(-k // columns), dtype=dtype)
        numbers, meant = torch.empty(n, k, dtype=torch.float8_e4m3fn), np.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                part = torch.from_numpy(weight[block])
                scales[i, j] = part.abs().max() / 448 * float(rng.uniform(0.9, 1.1))
                scale = float(scales[i, j])
                numbers[block] = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                meant[block] = numbers[block].float().numpy() * np.float32(scale)
        return {"weight": numbers, "weight_scale_inv": scales}, meant

    return quantize


def whole(rng: np.random.Generator, weight: Matrix) -> tuple[Tensors, Matrix]:
    """One scale for a weight, and one for its static activations, as AutoFP8 writes it."""
    tensors, meant = in_blocks(*weight.shape)(rng, weight)
    scale = tensors.pop("weight_scale_inv").reshape(())
    return tensors | {"weight_scale": scale, "input_scale": torch.tensor(0.5)}, meant


def by_row(rng: np.random.Generator, weight: Matrix) -> tuple[Tensors, Matrix]:
    tensors, meant = in_blocks(1, weight.shape[1], torch.bfloat16)(rng, weight)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, meant


BLOCKS = {"weight_block_size": [32, 24]}


@pytest.mark.parametrize(
    ("model", "quantize", "fields"),
    [
        ("qwen3", in_blocks(32, 24), BLOCKS),  # neither divides the weights' sizes
        ("qwen3-moe", in_blocks(32, 24), BLOCKS),
        ("llama-untied-bias", in_blocks(32, 24, torch.bfloat16), BLOCKS | {"scale_fmt": "ue8m0"}),
        ("qwen2", whole, {"activation_scheme": "static", "ignored_layers": ["lm_head"]}),
        ("llama-untied-bias", by_row, {"modules_to_not_convert": ["lm_head"]}),
        ("hunyuan_v1_dense", by_row, {}),
        ("glm4", by_row, {}),  # gate and up are one tensor, and rows of q and k are stored as pairs
        ("glm4_moe", in_blocks(32, 24), BLOCKS),
    ],
)
def test_logits_equal_those_of_the_dequantized_weights(
    model: str, quantize: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    assert_equal(tmp_path, write(model, tmp_path, quantize, CONFIG | fields))


def test_modules_that_are_not_quantized_are_read_as_they_are(tmp_path: Path) -> None:
    plain = ("lm_head", "o_proj", "layers.0.mlp.up_proj")
    names = ["lm_head", "model.layers.0.mlp.up_proj"]
    config = CONFIG | BLOCKS | {"modules_to_not_convert": names}
    assert_equal(tmp_path, write("llama-untied-bias", tmp_path, in_blocks(32, 24), config, plain))


def test_a_quantized_output_layer_is_read(tmp_path: Path) -> None:
    model = write("llama-untied-bias", tmp_path, in_blocks(32, 24), CONFIG | BLOCKS, plain=())
    assert_equal(tmp_path, model)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8")
    write("llama-untied-bias", path, in_blocks(32, 24), CONFIG | BLOCKS)
    return path


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    return copied(written, tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"a_field_of_next_year": 1}, ("a_field_of_next_year",)),
        ({"quant_method": None}, ("quantization_config", "quant_method is missing")),
        ({"quant_method": "fp9"}, ("quant_method 'fp9'",)),
        ({"quant_method": ["fp8"]}, ("quant_method ",)),
        ({"quant_method": "bitsandbytes"}, ("bitsandbytes",)),
        ({"quant_method": None, "load_in_4bit": True}, ("bitsandbytes",)),
        ({"fmt": "e5m2"}, ("fmt", "e5m2")),
        ({"scale_fmt": "odd"}, ("scale_fmt",)),
        ({"activation_scheme": "both"}, ("activation_scheme",)),
        ({"weight_block_size": [32]}, ("weight_block_size",)),
        ({"weight_block_size": [32, 0]}, ("weight_block_size", "columns")),
        ({"weight_block_size": [32, "24"]}, ("weight_block_size", "columns")),
        ({"weight_block_size": [16, 24]}, ("weight_scale_inv", "shape")),
        ({"weight_block_size": None}, ("weight_scale_inv", "shape")),
        ({"modules_to_not_convert": "lm_head"}, ("modules_to_not_convert",)),
        ({"modules_to_not_convert": [MODULE]}, (MODULE, "excludes")),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(
    model: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    change_quantization(model, **fields)
    refused(model, *words)


def test_a_configuration_that_is_no_object_is_refused(model: Path) -> None:
    set_config(model, quantization_config=["fp8"])
    refused(model, "quantization_config")


SCALES = MODULE + ".weight_scale_inv"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.01])
def test_scales_that_nothing_can_be_multiplied_by_are_refused_by_name(model: Path, value: float) -> None:
    change_tensors(model, lambda tensors: tensors[SCALES][0, -1:].fill_(value))
    refused(model, SCALES, "scales")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop(SCALES),
        lambda tensors: tensors.update({SCALES: tensors[SCALES][:, :-1].contiguous()}),
        lambda tensors: tensors.update({SCALES: tensors[SCALES].flatten()}),
        lambda tensors: tensors.update({SCALES: tensors[SCALES].int()}),
        lambda tensors: tensors.update({MODULE + ".weight": tensors[MODULE + ".weight"].float()}),
        lambda tensors: tensors.update({MODULE + ".weight": tensors[MODULE + ".weight"][:-1]}),
        lambda tensors: tensors.update({MODULE + ".weight": tensors[MODULE + ".weight"].flatten()}),
        lambda tensors: tensors.update({MODULE + ".weight": tensors[MODULE + ".weight"].to(torch.int8)}),
        lambda tensors: tensors.update({MODULE + ".weight_scale": tensors[SCALES].clone()}),
        lambda tensors: tensors.update({MODULE + ".weight": torch.empty(0, 64).to(torch.float8_e4m3fn)}),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(model: Path, change: Callable[[Tensors], Any]) -> None:
    change_tensors(model, change)
    refused(model, MODULE)


def test_a_number_that_is_not_finite_is_refused_by_name(model: Path) -> None:
    name = MODULE + ".weight"
    change_tensors(model, lambda tensors: tensors[name].view(torch.uint8)[3, 5:6].fill_(0x7F))
    with pytest.raises(ModelError, match=f"{name}' has NaN"):
        loaded(model)


def test_fp8_weights_without_a_configuration_are_refused(model: Path) -> None:
    set_config(model, quantization_config=None)
    refused(model, "F8_E4M3")
