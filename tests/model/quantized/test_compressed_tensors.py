"""Checkpoints of compressed-tensors: equal to their dequantization, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.quantized.words import packed_columns, packed_rows
from tests.model.quantized.written import (
    Matrix,
    Quantize,
    Tensors,
    assert_equal,
    change_quantization,
    change_tensors,
    copied,
    refused,
    write,
)

MODULE = "model.layers.1.self_attn.k_proj"
GROUP = 8


def config(layout: str, arguments: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": None}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": weights | arguments, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
        **fields,
    }


def split(weight: Matrix, strategy: str, order: np.ndarray | None) -> np.ndarray:
    """Of each number, which scale it has: int [n, k]."""
    n, k = weight.shape
    rows, columns = np.arange(n)[:, None], np.arange(k)[None] if order is None else order[None]
    return {
        "tensor": np.zeros((n, k), np.int64),
        "channel": rows + np.zeros((1, k), np.int64),
        "group": rows * (k // GROUP) + columns // GROUP,
        "block": rows // 32 * -(-k // 24) + columns // 24,
    }[strategy]


def quantizer(
    layout: str, strategy: str, bits: int = 8, *, zeros: bool = False, ordered: bool = False
) -> Quantize:
    """A writer of numbers with scales in bf16, and zero points and a shuffled index if wanted."""

    def quantize(rng: np.random.Generator, weight: Matrix) -> tuple[Tensors, Matrix]:
        n, k = weight.shape
        order = rng.permutation(k) if ordered else None
        place = split(weight, strategy, order)
        count = int(place.max()) + 1
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        points = rng.integers(low, high + 1, count) if zeros else np.zeros(count, np.int64)
        scales = np.zeros(count, np.float32)
        np.maximum.at(scales, place, np.abs(weight) / high)
        scales = torch.from_numpy(scales).bfloat16().float().numpy()
        each = scales[place]
        is_float = layout == "float-quantized"
        if is_float:
            numbers = torch.from_numpy(weight / (scales[place] * np.float32(127 / 448)))
            numbers = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)
            each = (scales * 2.0**-2).astype(np.float32)[place]
            values = numbers.float().numpy()
        else:
            values = np.clip(np.rint(weight / each) + points[place], low, high)
        shape = {
            "tensor": (1,), "channel": (n, 1), "group": (n, k // GROUP), "block": (-(-n // 32), -(-k // 24)),
        }[strategy]  # fmt: skip
        stored = (scales * 2.0**-2 if is_float else scales).astype(np.float32).reshape(shape)
        tensors: Tensors = {"weight_scale": torch.from_numpy(stored).bfloat16()}
        whole = values.astype(np.int64)
        if layout == "pack-quantized":
            more = -k % (32 // bits)
            tensors["weight_packed"] = packed_rows(np.pad(whole - low, [(0, 0), (0, more)]), bits)
            tensors["weight_shape"] = torch.tensor([n, k])
            if zeros:
                tensors["weight_zero_point"] = packed_columns(points.reshape(shape) - low, bits)
        else:
            tensors["weight"] = numbers if is_float else torch.from_numpy(whole.astype(np.int8))
            if zeros:
                tensors["weight_zero_point"] = torch.from_numpy(points.reshape(shape).astype(np.int8))
        if order is not None:
            tensors["weight_g_idx"] = torch.from_numpy((order // GROUP).astype(np.int32))
        meant = (values - points[place]).astype(np.float32) * each
        return tensors, meant

    return quantize


CASES: dict[str, tuple[str, Quantize, dict[str, Any]]] = {
    "W8A8": ("int-quantized", quantizer("int-quantized", "channel"), {"strategy": "channel"}),
    "W8A8 with zero points": (
        "int-quantized",
        quantizer("int-quantized", "channel", zeros=True),
        {"strategy": "channel", "symmetric": False},
    ),
    "W8 per tensor": ("naive-quantized", quantizer("naive-quantized", "tensor"), {"strategy": "tensor"}),
    "W8A16": ("pack-quantized", quantizer("pack-quantized", "channel"), {"group_size": -1}),
    "W4A16": (
        "pack-quantized",
        quantizer("pack-quantized", "group", 4),
        {"num_bits": 4, "strategy": "group", "group_size": GROUP},
    ),
    "W4A16 with zero points and act-order": (
        "pack-quantized",
        quantizer("pack-quantized", "group", 4, zeros=True, ordered=True),
        {"num_bits": 4, "group_size": GROUP, "symmetric": False, "actorder": "group"},
    ),
    "fp8 per row": (
        "float-quantized",
        quantizer("float-quantized", "channel"),
        {"type": "float", "strategy": "channel"},
    ),
    "fp8 in blocks": (
        "float-quantized",
        quantizer("float-quantized", "block"),
        {"type": "float", "strategy": "block", "block_structure": [32, 24]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_dequantized_weights(case: str, tmp_path: Path) -> None:
    layout, quantize, arguments = CASES[case]
    assert_equal(tmp_path, write("llama-untied-bias", tmp_path, quantize, config(layout, arguments)))


def test_experts_are_read_and_their_router_stays_as_it_is(tmp_path: Path) -> None:
    layout, quantize, arguments = CASES["W8A8"]
    plain = ("lm_head", "mlp.gate")
    assert_equal(tmp_path, write("qwen3-moe", tmp_path, quantize, config(layout, arguments), plain))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compressed")
    layout, quantize, arguments = CASES["W4A16 with zero points and act-order"]
    write("llama", path, quantize, config(layout, arguments))
    return path


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    return copied(written, tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"a_field_of_next_year": 1}, ("a_field_of_next_year",)),
        ({"format": "nvfp4-pack-quantized"}, ("format", "nvfp4")),
        ({"format": None}, ("format",)),
        ({"format": {}}, ("format ",)),
        ({"format": "int-quantized"}, ("down_proj.weight'", "weight_shape")),
        ({"quantization_status": "frozen"}, ("quantization_status",)),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparsity_config",)),
        ({"transform_config": {"config_groups": {}}}, ("transform_config",)),
        ({"config_groups": {"g": {"weights": {}, "hidden": 1}}}, ("config_groups: g", "hidden")),
        ({"config_groups": {}}, ("config_groups",)),
        ({"config_groups": {"W4A16": ["Linear"]}}, ("config_groups: W4A16", "weights")),
        ({"config_groups": None}, ("config_groups",)),
        ({"ignore": [MODULE]}, (MODULE, "excludes")),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(
    model: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    change_quantization(model, **fields)
    refused(model, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"a_field_of_next_year": 1}, ("weights", "a_field_of_next_year")),
        ({"num_bits": 3}, ("num_bits 3",)),
        ({"num_bits": 8}, ("weight_shape",)),
        ({"type": "float"}, ("type", "float")),
        ({"type": "complex"}, ("type", "complex")),
        ({"type": ["int"]}, ("type ",)),
        ({"strategy": "token"}, ("strategy", "token")),
        ({"strategy": "block"}, ("block_structure is missing",)),
        ({"strategy": "channel"}, ("weight_scale", "shape")),
        ({"group_size": 24}, ("weight_packed", "groups of 24")),
        ({"group_size": 4}, ("weight_scale", "shape")),
        ({"group_size": 0}, ("group_size",)),
        ({"symmetric": "no"}, ("symmetric",)),
        ({"dynamic": True}, ("dynamic",)),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    model: Path, arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    given = CASES["W4A16 with zero points and act-order"][2] | arguments
    change_quantization(model, config_groups=config("pack-quantized", given)["config_groups"])
    refused(model, *words)


def test_groups_with_arguments_of_their_own_are_refused(model: Path) -> None:
    first = config("pack-quantized", CASES["W4A16"][2])["config_groups"]["group_0"]
    second = first | {"weights": first["weights"] | {"num_bits": 8}}
    change_quantization(model, config_groups={"group_0": first, "group_1": second})
    refused(model, "config_groups: group_1", "weights")


@pytest.mark.parametrize(
    ("suffix", "value"),
    [
        ("weight_scale", float("nan")),
        ("weight_scale", float("inf")),
        ("weight_scale", 0.0),
        ("weight_scale", -0.5),
        ("weight_g_idx", 8),
        ("weight_g_idx", -1),
        ("weight_shape", 65),
        ("weight_shape", -1),
        ("weight_shape", 2**62),
    ],
)
def test_values_that_lead_nowhere_are_refused_by_name(model: Path, suffix: str, value: float) -> None:
    name = f"{MODULE}.{suffix}"
    change_tensors(model, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    refused(model, name)


def test_an_index_that_does_not_fill_all_groups_is_refused(model: Path) -> None:
    name = MODULE + ".weight_g_idx"
    change_tensors(model, lambda tensors: tensors[name].fill_(3))
    refused(model, name, "different sizes")


@pytest.mark.parametrize(
    "suffix", ["weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"]
)
@pytest.mark.parametrize(
    "change", [lambda t: None, lambda t: t[:-1], lambda t: t[None], lambda t: t.double(), lambda t: t[:0]]
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    model: Path, suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    name = f"{MODULE}.{suffix}"

    def rewrite(tensors: Tensors) -> None:
        if (changed := change(tensors.pop(name))) is not None:
            tensors[name] = changed.long() if suffix == "weight_scale" and changed.ndim == 2 else changed

    change_tensors(model, rewrite)
    refused(model, MODULE + ".")
