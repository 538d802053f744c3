"""GPTQ checkpoints: both versions, with act-order and without; equal to their dequantization, or refused."""

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
    Tensors,
    assert_equal,
    change_quantization,
    change_tensors,
    copied,
    refused,
    write,
)

CONFIG: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False, "desc_act": False}
MODULE = "model.layers.1.self_attn.k_proj"


def gptq(
    bits: int = 4,
    group: int = 8,
    *,
    version: int = 1,
    symmetric: bool = False,
    ordered: bool = False,
    index: bool = True,
    bias: bool = False,
) -> Callable[[np.random.Generator, Matrix], tuple[Tensors, Matrix]]:
    """A writer of GPTQ's tensors, with random zero points, 0 among them in version 2."""

    def quantize(rng: np.random.Generator, weight: Matrix) -> tuple[Tensors, Matrix]:
        n, k = weight.shape
        size = k if group == -1 else group
        groups = np.arange(k) // size
        if ordered:
            groups = rng.permutation(groups)
        low = 1 if version == 1 else 0
        zeros = np.full((k // size, n), 2 ** (bits - 1))
        if not symmetric:
            zeros = rng.integers(low, 2**bits, zeros.shape)
        scales = np.zeros((k // size, n), np.float16)
        numbers = np.zeros((k, n), np.int64)
        meant = np.zeros((n, k), np.float32)
        for g in range(k // size):
            columns = np.flatnonzero(groups == g)
            scales[g] = np.abs(weight[:, columns]).max(1) / 2 ** (bits - 1)
        for j in range(k):
            scale, zero = scales[groups[j]].astype(np.float32), zeros[groups[j]]
            numbers[j] = np.clip(np.rint(weight[:, j] / scale) + zero, 0, 2**bits - 1)
            meant[:, j] = scale * (numbers[j] - zero).astype(np.float32)
        tensors = {
            "qweight": packed_columns(numbers, bits),
            "qzeros": packed_rows(zeros - 1 if version == 1 else zeros, bits),
            "scales": torch.from_numpy(scales),
        }
        if index:
            tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
        if bias:
            tensors["bias"] = torch.zeros(n, dtype=torch.float16)
        return tensors, meant

    return quantize


@pytest.mark.parametrize(
    ("model", "quantize", "fields"),
    [
        ("qwen3", gptq(), {"checkpoint_format": "gptq", "damp_percent": 0.1, "meta": {}}),
        ("qwen3", gptq(ordered=True), {"desc_act": True, "dynamic": {"-:.*gate.*": {}}}),
        ("qwen2", gptq(version=2, ordered=True), {"desc_act": True, "checkpoint_format": "gptq_v2"}),
        ("llama", gptq(symmetric=True, bias=True), {"sym": True}),
        ("llama-untied-bias", gptq(index=False), {"modules_to_not_convert": ["lm_head"]}),
        ("llama-untied-bias", gptq(group=-1), {"group_size": -1}),
        ("granite", gptq(), {}),
        ("glm4", gptq(), {}),
        ("qwen3-moe", gptq(bits=8, version=2), {"bits": 8, "checkpoint_format": "gptq_v2"}),
    ],
)
def test_logits_equal_those_of_the_dequantized_weights(
    model: str, quantize: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    assert_equal(tmp_path, write(model, tmp_path, quantize, CONFIG | fields))


def test_a_zero_point_of_0_survives_the_first_version(tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from each of a word's numbers in one subtraction, which borrows from the next."""
    theirs = write("llama", tmp_path, gptq(version=2), CONFIG)

    def first_version(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("qzeros"):
                assert any(((tensors[name] >> shift) & 15).eq(0).any() for shift in range(0, 32, 4))
                tensors[name] -= 0x11111111

    change_tensors(tmp_path, first_version)
    assert_equal(tmp_path, theirs)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gptq")
    write("llama", path, gptq(ordered=True), CONFIG | {"desc_act": True})
    return path


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    return copied(written, tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"a_field_of_next_year": 1}, ("a_field_of_next_year",)),
        ({"bits": 3}, ("bits 3",)),
        ({"bits": None}, ("bits is missing",)),
        ({"bits": "4"}, ("bits",)),
        ({"bits": 8}, ("qweight", "groups of 8")),
        ({"group_size": 0}, ("group_size",)),
        ({"group_size": -2}, ("group_size",)),
        ({"group_size": None}, ("group_size is missing",)),
        ({"group_size": 24}, ("groups of 24", "qweight")),
        ({"group_size": 16}, ("qweight", "groups of 16")),
        ({"group_size": 4}, ("qzeros", "shape")),
        ({"checkpoint_format": "marlin"}, ("desc_act",)),
        ({"checkpoint_format": "bitblas"}, ("checkpoint_format", "bitblas")),
        ({"format": "gptq_v3"}, ("gptq_v3",)),
        ({"is_marlin_format": True}, ("desc_act",)),
        ({"pack_dtype": "int16"}, ("pack_dtype",)),
        ({"desc_act": "yes"}, ("desc_act",)),
        ({"dynamic": {"+:.*": {"bits": 8}}}, ("dynamic",)),
        ({"dynamic": ["-:.*"]}, ("dynamic",)),
        ({"rotation": "hadamard"}, ("rotation",)),
        ({"modules_to_not_convert": [MODULE]}, (MODULE, "excludes")),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(
    model: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    change_quantization(model, **fields)
    refused(model, *words)


@pytest.mark.parametrize(
    ("suffix", "value"),
    [
        ("scales", float("nan")),
        ("scales", float("inf")),
        ("scales", 0.0),
        ("g_idx", 8),
        ("g_idx", -1),
        ("g_idx", 2**31 - 1),
    ],
)
def test_values_that_lead_nowhere_are_refused_by_name(model: Path, suffix: str, value: float) -> None:
    name = f"{MODULE}.{suffix}"
    change_tensors(model, lambda tensors: tensors[name].view(-1)[-2:-1].fill_(value))
    refused(model, name)


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize(
    "change", [lambda t: None, lambda t: t[:-1], lambda t: t[None], lambda t: t.double(), lambda t: t[:0]]
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    model: Path, suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    name = f"{MODULE}.{suffix}"

    def rewrite(tensors: Tensors) -> None:
        if (changed := change(tensors.pop(name))) is not None:
            tensors[name] = changed.long() if suffix == "scales" and changed.is_floating_point() else changed

    change_tensors(model, rewrite)
    refused(model, MODULE + ".")


def test_a_weight_beside_its_quantized_self_is_refused(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.update({MODULE + ".weight": torch.zeros(32, 64)}))
    refused(model, MODULE + ".weight", "beside")


def test_a_bias_that_the_model_does_not_have_is_refused_unless_it_is_zero(model: Path) -> None:
    change_tensors(model, lambda tensors: tensors.update({MODULE + ".bias": torch.full((32,), 0.1)}))
    refused(model, MODULE + ".bias")
