"""AWQ checkpoints in both packing orders: equal to their dequantization, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.quantized.words import packed_rows
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

CONFIG: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}
GEMM_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
MODULE = "model.layers.1.self_attn.k_proj"


def quantized(
    rng: np.random.Generator, weight: Matrix, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Matrix]:
    """Numbers [n, k], zero points and scales [n, groups], and the weight that they stand for."""
    n, k = weight.shape
    size = k if group == -1 else group
    zeros = rng.integers(0, 16, (n, k // size))
    scales = (np.abs(weight).reshape(n, -1, size).max(2) / 8).astype(np.float16)
    numbers, meant = np.zeros((n, k), np.int64), np.zeros((n, k), np.float32)
    for j in range(k):
        scale, zero = scales[:, j // size].astype(np.float32), zeros[:, j // size]
        numbers[:, j] = np.clip(np.rint(weight[:, j] / scale) + zero, 0, 15)
        meant[:, j] = (numbers[:, j] - zero).astype(np.float32) * scale
    return numbers, zeros, scales, meant


def gemm(group: int = 8) -> Callable[[np.random.Generator, Matrix], tuple[Tensors, Matrix]]:
    def quantize(rng: np.random.Generator, weight: Matrix) -> tuple[Tensors, Matrix]:
        numbers, zeros, scales, meant = quantized(rng, weight, group)
        return {
            "qweight": packed_rows(numbers.T, 4, GEMM_ORDER),
            "qzeros": packed_rows(zeros.T, 4, GEMM_ORDER),
            "scales": torch.from_numpy(scales.T.copy()),
        }, meant

    return quantize


def gemv(group: int, padded: int) -> Callable[[np.random.Generator, Matrix], tuple[Tensors, Matrix]]:
    """Groups are padded with zeros to a multiple of `padded`."""

    def quantize(rng: np.random.Generator, weight: Matrix) -> tuple[Tensors, Matrix]:
        numbers, zeros, scales, meant = quantized(rng, weight, group)
        more = [(0, 0), (0, -zeros.shape[1] % padded)]
        return {
            "qweight": packed_rows(numbers, 4),
            "qzeros": packed_rows(np.pad(zeros, more), 4),
            "scales": torch.from_numpy(np.pad(scales, more)),
        }, meant

    return quantize


@pytest.mark.parametrize(
    ("model", "quantize", "fields", "plain"),
    [
        ("qwen3", gemm(), {"zero_point": True}, ()),
        ("qwen3-moe", gemm(), {"version": "GEMM", "modules_to_not_convert": ["gate"]}, ("mlp.gate",)),
        ("llama-untied-bias", gemm(-1), {"group_size": -1}, ("lm_head",)),
        ("qwen3", gemm(), {"version": "exllama", "exllama_config": {"version": 1}}, ()),
        ("llama", gemm(), {"version": "exllamav2"}, ("down_proj",)),
        ("qwen2", gemv(8, 8), {"version": "gemv"}, ("lm_head",)),
        ("llama", gemv(32, 32), {"version": "gemv", "group_size": 32}, ("down_proj",)),
    ],
)
def test_logits_equal_those_of_the_dequantized_weights(
    model: str, quantize: Any, fields: dict[str, Any], plain: tuple[str, ...], tmp_path: Path
) -> None:
    assert_equal(tmp_path, write(model, tmp_path, quantize, CONFIG | fields, ("lm_head", *plain)))


@pytest.fixture(scope="module", params=["gemm", "gemv"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("awq")
    quantize = gemm() if request.param == "gemm" else gemv(8, 8)
    write("llama", path, quantize, CONFIG | {"version": request.param})
    return path


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    return copied(written, tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"a_field_of_next_year": 1}, ("a_field_of_next_year",)),
        ({"bits": 8}, ("bits 8",)),
        ({"bits": 5}, ("bits 5",)),
        ({"group_size": 0}, ("group_size",)),
        ({"group_size": 24}, ("qweight", "groups of 24")),
        ({"group_size": 4}, ("qzeros", "shape")),
        ({"version": "gemv_fast"}, ("version", "gemv_fast")),
        ({"version": "marlin"}, ("version", "marlin")),
        ({"version": 1}, ("version",)),
        ({"zero_point": "no"}, ("zero_point",)),
        ({"modules_to_not_convert": [MODULE]}, (MODULE, "excludes")),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(
    model: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    change_quantization(model, **fields)
    refused(model, *words)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.0, -0.5])
def test_scales_that_nothing_can_be_multiplied_by_are_refused_by_name(model: Path, value: float) -> None:
    name = MODULE + ".scales"
    change_tensors(model, lambda tensors: tensors[name][0, :1].fill_(value))
    refused(model, name)


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize(
    "change", [lambda t: None, lambda t: t[:-1], lambda t: t[:, :-1], lambda t: t.long(), lambda t: t[:0]]
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    model: Path, suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    name = f"{MODULE}.{suffix}"

    def rewrite(tensors: Tensors) -> None:
        if (changed := change(tensors.pop(name))) is not None:
            tensors[name] = changed.contiguous()

    change_tensors(model, rewrite)
    refused(model, MODULE + ".")
