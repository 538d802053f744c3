"""GPTQ checkpoints in Marlin's order: equal to their dequantization, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from tests.model.quantized.words import packed_rows
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

CONFIG: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
    "checkpoint_format": "marlin",
}  # fmt: skip
MODULE = "model.layers.1.self_attn.k_proj"


def wide() -> LlamaConfig:
    """Sizes that the order divides."""
    return LlamaConfig(
        vocab_size=211, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=2, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def marlin(group: int = 32, *, workspace: bool = False) -> Quantize:
    """A writer of Marlin's tensors, one number at a time, as the kernel's lanes read them."""

    def quantize(rng: np.random.Generator, weight: Matrix) -> tuple[Tensors, Matrix]:
        n, k = weight.shape
        size = k if group == -1 else group
        scales = (np.abs(weight).reshape(n, -1, size).max(2) / 8).astype(np.float16)  # [n, groups]
        spread = scales.astype(np.float32).repeat(size, 1)
        numbers = np.clip(np.rint(weight / spread) + 8, 0, 15).astype(np.int64)
        lines = []
        for first_input in range(0, k, 16):
            line: list[int] = []
            for first_output in range(0, n, 64):
                for lane in range(32):
                    for tile in range(4):
                        word = []
                        for half in range(2):
                            output = first_output + 16 * tile + 8 * half + lane // 4
                            for row in (0, 1, 8, 9):
                                word.append(int(numbers[output, first_input + 2 * (lane % 4) + row]))
                        line += word[::2] + word[1::2]
            lines.append(line)
        together = 32 if size == k else 64
        ordered = []
        for first in range(0, n, together):
            if size == k:
                places = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
            else:
                places = [i + 8 * j for i in range(8) for j in range(8)]
            ordered += [first + place for place in places]
        tensors = {
            "B": packed_rows(np.array(lines), 4),
            "s": torch.from_numpy(scales.T[:, ordered].copy()),
        }
        if workspace:
            tensors["workspace"] = torch.zeros(n // 128 * 16 or 1, dtype=torch.int32)
        return tensors, (numbers - 8).astype(np.float32) * spread

    return quantize


@pytest.mark.parametrize(
    ("quantize", "fields"),
    [
        (marlin(), {}),
        (marlin(64, workspace=True), {"group_size": 64, "checkpoint_format": None, "is_marlin_format": True}),
        (marlin(-1), {"group_size": -1}),
    ],
)
def test_logits_equal_those_of_the_dequantized_weights(
    quantize: Quantize, fields: dict[str, Any], tmp_path: Path
) -> None:
    given = {key: value for key, value in (CONFIG | fields).items() if value is not None}
    assert_equal(tmp_path, write(wide(), tmp_path, quantize, given))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("marlin")
    write(wide(), path, marlin(), CONFIG)
    return path


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    return copied(written, tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bits": 8}, ("bits 8",)),
        ({"desc_act": True}, ("desc_act",)),
        ({"sym": False}, ("sym",)),
        ({"group_size": 80}, ("B", "groups of 80")),
        ({"group_size": 64}, (".s", "shape")),
        ({"a_field_of_next_year": 1}, ("a_field_of_next_year",)),
        ({"modules_to_not_convert": [MODULE]}, (MODULE, "excludes")),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(
    model: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    change_quantization(model, **fields)
    refused(model, *words)


@pytest.mark.parametrize("suffix", ["B", "s"])
@pytest.mark.parametrize("cut", ["rows", "columns", "gone", "wide", "empty"])
def test_tensors_that_do_not_fit_are_refused_by_name(model: Path, suffix: str, cut: str) -> None:
    name = f"{MODULE}.{suffix}"

    def rewrite(tensors: Tensors) -> None:
        tensor = tensors.pop(name)
        changed = {
            "rows": tensor[:-1], "columns": tensor[:, :-4], "wide": tensor.long(), "empty": tensor[:0],
        }  # fmt: skip
        if cut in changed:
            tensors[name] = changed[cut].contiguous()

    change_tensors(model, rewrite)
    refused(model, MODULE)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_scales_that_nothing_can_be_multiplied_by_are_refused_by_name(model: Path, value: float) -> None:
    change_tensors(model, lambda tensors: tensors[f"{MODULE}.s"][0, :1].fill_(value))
    refused(model, f"{MODULE}.s")
