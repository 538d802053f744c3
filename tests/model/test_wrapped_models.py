"""The text models of models that take images equal transformers'; what reads images is left on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from tests.model.gguf_models import convert
from tests.model.quantized.test_fp8 import CONFIG as FP8
from tests.model.quantized.test_fp8 import whole
from tests.model.quantized.written import assert_equal, write
from tests.model.test_architectures import check_batch, check_pieces, check_tokens, expected_of, loaded
from tests.model.wrapped_models import CASES, FAST_CASES, VARIANTS, save_wrapped

_FILE = "model.safetensors"
_NORM, _EXTRA = "model.norm.weight", "model.language_model.extra.weight"


@pytest.mark.parametrize(
    ("kind", "variant"),
    [pytest.param(*case, marks=[] if case in FAST_CASES else pytest.mark.slow) for case in CASES],
)
def test_a_text_model_inside_equals_transformers(
    kind: str, variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    expected = expected_of(save_wrapped(kind, variant, tmp_path))
    backend = loaded(tmp_path)
    check_pieces(backend, expected)
    check_batch(backend, expected)
    check_tokens(backend, expected)
    backend.close()
    [said] = [record for record in caplog.records if "texts only" in record.getMessage()]
    assert "vis" in getattr(said, "fields", {})["skipped"]


def in_the_newer_layout(tensors: dict[str, Any]) -> dict[str, Any]:
    """By the names of transformers 5's own modules; it writes those of the first published files."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("language_model."):
            name = name.replace("language_model.model.", "model.language_model.").removeprefix(
                "language_model."
            )
        elif name.startswith(("model.layers.", "model.norm.", "model.embed_tokens.")):
            name = name.replace("model.", "model.language_model.", 1)
        elif not name.startswith(("model.", "lm_head.")):
            name = f"model.{name}"
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("kind", VARIANTS)
def test_tensors_may_have_the_names_of_newer_files(kind: str, tmp_path: Path) -> None:
    expected = expected_of(save_wrapped(kind, "plain", tmp_path))
    change_tensors(tmp_path, in_the_newer_layout)
    backend = loaded(tmp_path)
    check_pieces(backend, expected)
    backend.close()


def test_the_fields_of_the_text_model_may_stand_beside_the_others(tmp_path: Path) -> None:
    expected = expected_of(save_wrapped("qwen2_5_vl", "plain", tmp_path))
    change_config(tmp_path, lambda config: {**config.pop("text_config"), **config})
    backend = loaded(tmp_path)
    check_pieces(backend, expected)
    backend.close()


def in_both_places(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers 4.52 to 4.56 saves a model whose file had no text_config."""
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    old = {"rope_theta": rope["rope_theta"], "sliding_window": None, "image_token_id": None}
    text |= old | {
        "rope_scaling": {key: rope[key] for key in ("rope_type", "mrope_section")} | {"type": "default"}
    }
    twice = {key: text[key] for key in text if key not in ("layer_types", "model_type")}
    return twice | config | {"sliding_window": 32_768}


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_fields_of_the_text_model_may_stand_in_both_places(kind: str, tied: bool, tmp_path: Path) -> None:
    """What is inside counts, but for the flag of a tied output layer, which ties in either place."""
    save_wrapped(kind, "tied" if tied else "plain", tmp_path)
    change_config(tmp_path, in_both_places)
    if tied:
        change_config(
            tmp_path,
            lambda config: inside({"tie_word_embeddings": True})(config) | {"tie_word_embeddings": False},
        )
    theirs = AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    backend = loaded(tmp_path)
    check_pieces(backend, expected_of(theirs.eval()))
    backend.close()


@pytest.mark.parametrize(
    "field", ["hidden_size", "rms_norm_eps", "rope_scaling", "rope_theta", "num_hidden_layers", "hidden_act"]
)
def test_a_field_that_is_another_beside_the_text_model_is_refused_by_name(field: str, tmp_path: Path) -> None:
    save_wrapped("qwen2_5_vl", "plain", tmp_path)
    change_config(tmp_path, lambda config: in_both_places(config) | {field: 3})
    with pytest.raises(ModelError, match=f"config.json: {field} 3 is not that of text_config, "):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_a_quantized_text_model_inside_equals_transformers(kind: str, tmp_path: Path) -> None:
    assert_equal(tmp_path, write(lambda path: save_wrapped(kind, "plain", path), tmp_path, whole, FP8))


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
def test_its_quantization_may_be_told_inside(kind: str, tmp_path: Path) -> None:
    expected = write(lambda path: save_wrapped(kind, "plain", path), tmp_path, whole, FP8)
    told = "quantization_config"
    change_config(tmp_path, lambda config: inside({told: config[told]})(config))
    assert_equal(tmp_path, expected)
    change_config(tmp_path, lambda config: {key: config[key] for key in config if key != told})
    assert_equal(tmp_path, expected)
    change_config(tmp_path, lambda config: config | {told: {"quant_method": "awq"}})
    with pytest.raises(ModelError, match="quantization_config is not that of text_config"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_gguf_file_is_the_text_model_inside(kind: str, tmp_path: Path) -> None:
    expected = expected_of(save_wrapped(kind, "plain", tmp_path))
    change_config(tmp_path, lambda config: config["text_config"])
    change_tensors(
        tmp_path,
        lambda tensors: {
            name.replace("model.language_model.", "model."): tensor
            for name, tensor in tensors.items()
            if "visual" not in name
        },
    )
    backend = loaded(convert(tmp_path, tmp_path / "model.gguf"))
    check_pieces(backend, expected)
    backend.close()


def inside(changes: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: config | {"text_config": config["text_config"] | changes}


REFUSED: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    ("gemma3", lambda config: config | {"text_config": None}, "text_config"),
    ("gemma3", lambda config: config | {"text_config": [1]}, "text_config"),
    ("gemma3", lambda config: config | {"logit_scale": 2.0}, "logit_scale"),
    ("gemma3", lambda config: config | {"audio_config": {"hidden_size": 8}}, "audio_config"),
    ("gemma3", inside({"model_type": "llama"}), "model_type 'llama' is not supported in gemma3"),
    ("gemma3", inside({"model_type": ["gemma3_text"]}), "model_type"),
    ("gemma3", inside({"a_field_of_next_year": 1}), "text_config: the field 'a_field_of_next_year'"),
    ("mistral3", inside({"model_type": "qwen2"}), "model_type 'qwen2' is not supported in mistral3"),
    ("qwen3_vl", inside({"rope_parameters": {"mrope_section": [2, 2, 3]}}), "mrope_section"),
    ("qwen3_vl", inside({"rope_parameters": {"mrope_section": [2, 2, "2"]}}), "mrope_section"),
    ("qwen3_vl", inside({"rope_parameters": {"mrope_section": [8, -2, 0]}}), "mrope_section"),
    ("qwen3_vl", inside({"rope_parameters": {"mrope_interleaved": 1}}), "mrope_interleaved"),
    ("qwen3_vl", inside({"num_hidden_layers": 3}), "model.layers.2"),
]


@pytest.mark.parametrize(("kind", "change", "named"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_is_not_the_text_model_s_is_refused_by_name(
    kind: str, change: Callable[[dict[str, Any]], dict[str, Any]], named: str, tmp_path: Path
) -> None:
    save_wrapped(kind, "plain", tmp_path)
    change_config(tmp_path, change)
    with pytest.raises(ModelError, match=named.replace("[", ".")):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_text_model_s_tensor_is_there_once_and_has_a_use(kind: str, tmp_path: Path) -> None:
    save_wrapped(kind, "plain", tmp_path)
    change_tensors(tmp_path, lambda tensors: in_the_newer_layout(tensors) | {_NORM: one_of(tensors).clone()})
    with pytest.raises(ModelError, match="the same part of a model"):
        open_checkpoint(tmp_path)
    change_tensors(tmp_path, lambda tensors: {name.replace(_NORM, _EXTRA): tensors[name] for name in tensors})
    with pytest.raises(ModelError, match=_EXTRA):
        open_checkpoint(tmp_path)


def one_of(tensors: dict[str, Any]) -> Any:
    return next(one for name, one in tensors.items() if name.endswith("norm.weight"))


def change_config(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def change_tensors(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    save_file(change(load_file(path / _FILE)), path / _FILE, metadata={"format": "pt"})
