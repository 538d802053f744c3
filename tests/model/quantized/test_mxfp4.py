"""Experts of gpt-oss in MXFP4 equal transformers' dequantization, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.architecture.activation import Activation
from tests.model.quantized.written import (
    TOLERANCE,
    Tensors,
    assert_equal,
    change_tensors,
    copied,
    loaded,
    our_logits,
    refused,
    set_config,
    their_logits,
)
from tests.model.tiny import save_random

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
HIDDEN, INNER, EXPERTS = 64, 96, 4
STACK = "model.layers.1.mlp.experts."


def write(path: Path) -> PreTrainedModel:
    """A random model whose experts are random blocks; returns transformers' model of it."""
    theirs = save_random(
        GptOssConfig(
            vocab_size=211, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
            num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=13, eos_token_id=2,
        ),
        path,
    )  # fmt: skip
    torch.manual_seed(3)
    state = theirs.state_dict()

    def pack(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            _, inputs, outputs = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, (EXPERTS, outputs, inputs // 32), dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))

    change_tensors(path, pack)
    set_config(path, quantization_config=CONFIG)
    return theirs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("mxfp4")
    return path, write(path)


def test_logits_equal_those_of_transformers_dequantization(model: tuple[Path, PreTrainedModel]) -> None:
    assert_equal(*model)


def test_blocks_stay_blocks_with_activations_of_8_bits(model: tuple[Path, PreTrainedModel]) -> None:
    path, theirs = model
    backend = loaded(path, "blocks")
    errors = np.abs(our_logits(backend) - their_logits(theirs))
    backend.close()
    assert TOLERANCE < errors.max() < 0.3  # rounded activations, and nothing else


def test_the_clamped_activation_of_a_row_does_not_depend_on_the_other_rows() -> None:
    rows = torch.randn(33, 2 * 29) * 6
    together = Activation.CLAMPED.join(rows.clone())
    for count in (1, 2, 5, 16):
        assert torch.equal(Activation.CLAMPED.join(rows[:count].clone()), together[:count])


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    def changed(tensors: Tensors) -> None:
        tensors[STACK + name] = change(tensors[STACK + name]).contiguous()

    return changed


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(STACK + name)


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an expert less": lambda x: x[:-1],
    "an expert more": lambda x: torch.cat([x, x[:1]]),
    "an output less": lambda x: x[:, :-1],
    "two outputs less": lambda x: x[:, :-2],
    "an output more": lambda x: torch.cat([x, x[:, :1]], 1),
    "a dimension more": lambda x: x[None],
    "flat": lambda x: x.flatten(),
    "none": lambda x: x[:0],
    "of floats": lambda x: x.float(),
    "of 32 bits": lambda x: x.int(),
}
STACKS = (
    "gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales",
    "gate_up_proj_bias", "down_proj_bias",
)  # fmt: skip
WRONG: list[tuple[str, Callable[[Tensors], Any], str]] = [
    *[
        (f"{name}, {what}", put(name, change), name.split("_proj", maxsplit=1)[0])
        for name in STACKS
        for what, change in SHAPES.items()
        if not (name.endswith("_bias") and what == "of floats")
    ],
    *[(f"{name} is missing", without(name), name.split("_proj", maxsplit=1)[0]) for name in STACKS],
    (
        "half a block",
        put("down_proj_blocks", lambda x: x[..., :8]),
        "down_proj_blocks",
    ),
    (
        "a group less",
        put("down_proj_blocks", lambda x: x[:, :, 1:]),
        "down_proj_blocks",
    ),
    (
        "in two formats",
        lambda tensors: tensors.update({STACK + "down_proj": torch.zeros(EXPERTS, INNER, HIDDEN)}),
        "two formats",
    ),
    (
        "bytes elsewhere",
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(HIDDEN, dtype=torch.uint8)}),
        "model.norm.weight",
    ),
    ("no sinks", lambda tensors: tensors.pop("model.layers.0.self_attn.sinks"), "self_attn.sinks"),
    (
        "sinks of wrong length",
        lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(5)}),
        "self_attn.sinks",
    ),
    ("no router bias", lambda tensors: tensors.pop("model.layers.0.mlp.router.bias"), "mlp.router.bias"),
]


@pytest.mark.parametrize(("change", "named"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_stacks_that_lie_are_refused_by_name(
    change: Callable[[Tensors], Any], named: str, model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    change_tensors(copied(model[0], tmp_path), change)
    refused(tmp_path, named.replace("gate_up", "gate"))


@pytest.mark.parametrize(
    ("name", "value"), [("gate_up_proj_scales", 255), ("down_proj_scales", 255), ("down_proj_scales", 254)]
)
def test_scales_that_no_number_has_are_refused_by_name(
    name: str, value: int, model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[STACK + name][-1, -1, -1] = value
        tensors[STACK + name.replace("scales", "blocks")][-1, -1, -1] = 0x77

    change_tensors(copied(model[0], tmp_path), change)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"swiglu_limit": 6.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"experts_per_token": 3}, "experts_per_token"),
        ({"num_local_experts": 5}, "num_local_experts"),
        ({"model_type": "llama"}, "is not supported"),
        ({"quantization_config": CONFIG | {"bits": 4}}, "bits"),
        ({"quantization_config": CONFIG | {"modules_to_not_convert": 4}}, "modules_to_not_convert"),
    ],
)
def test_fields_of_the_experts_that_are_not_supported_are_refused_by_name(
    changes: dict[str, Any], named: str, model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    set_config(copied(model[0], tmp_path), **changes)
    refused(tmp_path, named)


def test_the_files_have_what_published_ones_have(model: tuple[Path, PreTrainedModel]) -> None:
    stored = load_file(model[0] / "model.safetensors")
    assert stored[STACK + "gate_up_proj_blocks"].shape == (EXPERTS, 2 * INNER, HIDDEN // 32, 16)
    assert stored[STACK + "down_proj_scales"].shape == (EXPERTS, HIDDEN, INNER // 32)
