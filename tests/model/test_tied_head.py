"""A tied output layer is what transformers makes of the flag and of the tensors that the file holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.model.test_config_fields import assert_equal_to_transformers
from tests.model.tiny import save

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], Any], *, tied: bool = True) -> Path:
    """A tied model, whose tensors and flag are changed on disk."""
    save("llama", path)
    file, config = path / "model.safetensors", path / "config.json"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    assert HEAD not in tensors
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": tied}))
    return path


def spec_is_tied(path: Path) -> bool:
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return checkpoint.spec.tied_embeddings


def test_another_head_in_the_file_is_used_whatever_the_flag_says(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = torch.randn_like(tensors[EMBEDDING])

    rewritten(tmp_path, add_head)
    assert not spec_is_tied(tmp_path)
    assert_equal_to_transformers(tmp_path)


def test_a_head_that_differs_in_one_number_is_another_head(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += 1

    assert not spec_is_tied(rewritten(tmp_path, add_head))
    assert_equal_to_transformers(tmp_path)


def test_the_same_head_in_the_file_is_tied(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert spec_is_tied(tmp_path)
    assert_equal_to_transformers(tmp_path)


def test_a_tied_head_without_an_embedding_is_both(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    assert spec_is_tied(tmp_path)
    assert_equal_to_transformers(tmp_path)


def test_a_tied_head_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING][:-1].clone()}))
    with pytest.raises(ModelError, match=r"lm_head\.weight.*shape"):
        open_checkpoint(tmp_path)


def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def test_a_model_that_was_saved_without_its_head_is_the_same_model(tmp_path: Path) -> None:
    """Qwen3-Embedding's files name tensors without "model."."""
    rewritten(tmp_path, without_prefix)
    assert_equal_to_transformers(tmp_path)


def test_a_model_without_its_head_that_is_not_tied_is_refused_by_name(tmp_path: Path) -> None:
    rewritten(tmp_path, without_prefix, tied=False)
    with pytest.raises(ModelError, match=r"the tensor 'lm_head\.weight' is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.k_norm.weight",
        "model.layers.2.mlp.gate_proj.bias",
        "model.layers.2.mlp.experts.0.gate_proj.weight",
        "lm_head.bias",
        "score.bias",  # of a classification head
    ],
)
def test_a_tensor_that_the_config_has_no_use_for_is_refused_by_name(name: str, tmp_path: Path) -> None:
    rewritten(tmp_path, lambda tensors: tensors.update({name: torch.ones(3)}))
    with pytest.raises(ModelError, match=f"tensor '{name}'"):
        open_checkpoint(tmp_path)


def test_later_layers_and_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    names = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.3.mlp.up_proj.weight",
    )
    rewritten(tmp_path, lambda tensors: tensors.update({name: torch.ones(3) for name in names}))
    assert_equal_to_transformers(tmp_path)
