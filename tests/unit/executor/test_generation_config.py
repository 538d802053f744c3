"""What generation_config.json says holds for every request, or is dropped or refused by name at the start."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.backends.torch_backend.files.generation import FALLBACK, gguf_defaults
from executor_service.backends.torch_backend.files.tokenizer_files import tokenizer_from_directory
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from executor_service.backends.torch_backend.settings import TorchSettings
from tests.unit.executor.model_files import refuses, write_config, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(Tokenizer(models.BPE({"x": 0}, [])).to_str())
    return tmp_path / "model"


def write_generation(path: Path, **values: Any) -> None:
    (path / "generation_config.json").write_text(json.dumps(values))


def test_defaults_within_their_ranges_are_kept(model: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}
    write_generation(model, do_sample=True, **values)
    assert tokenizer_from_directory(model).generation_defaults == values
    write_generation(model, **values)  # without do_sample they are not meant
    assert tokenizer_from_directory(model).generation_defaults == {**FALLBACK, "repetition_penalty": 1.05}


def test_a_model_that_brings_nothing_about_drawing_gets_defaults_that_small_models_bear(model: Path) -> None:
    assert tokenizer_from_directory(model).generation_defaults == FALLBACK
    assert 0 < FALLBACK["temperature"] < 1
    write_generation(model, do_sample=True, top_k=20)  # something: then the rest is as the contract says
    assert tokenizer_from_directory(model).generation_defaults == {"top_k": 20}


def test_sampling_parameters_of_a_gguf_file_are_used() -> None:
    given = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.mirostat": 1}
    assert gguf_defaults(given, "a.gguf") == {"temperature": 0.6, "top_k": 20}
    assert gguf_defaults({"general.sampling.temp": -1}, "a.gguf") == FALLBACK


def test_a_model_that_says_not_to_sample_is_greedy(model: Path) -> None:
    write_generation(model, do_sample=False, temperature=0.6, top_k=20, repetition_penalty=1.05)
    expected = {"temperature": 0.0, "repetition_penalty": 1.05}
    assert tokenizer_from_directory(model).generation_defaults == expected


NOT_APPLIED: dict[str, Any] = {
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5, 6],
    "bad_words_ids": [[5]],
    "no_repeat_ngram_size": 3,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": [2],
    "forced_decoder_ids": [[1, 5]],
    "min_new_tokens": 1,
    "num_beams": 4,
    "typical_p": 0.9,
    "stop_strings": ["x"],
}


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_what_a_model_says_of_all_its_texts_is_named_where_it_is_not_applied(
    model: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """One line; config.json counts where there is no other file, as in transformers."""
    off: dict[str, Any] = {
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "bad_words_ids": None,
        "suppress_tokens": [],
    }
    for given, names in ((NOT_APPLIED, {"file", *NOT_APPLIED}), (off, None)):
        caplog.clear()
        if place == "config.json":
            write_config(model, **given)
        else:
            write_generation(model, **given)
            write_config(model, **NOT_APPLIED)
        tokenizer_from_directory(model)
        lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
        assert [set(line) for line in lines] == ([names] if names else [])
        assert all(line["file"] == place for line in lines)


def test_what_a_gguf_file_says_of_all_its_texts_is_named(caplog: pytest.LogCaptureFixture) -> None:
    given = {"general.sampling.penalty_repeat": 1.1, "general.sampling.mirostat": 0}
    gguf_defaults(given, "a.gguf")
    (line,) = (record.fields for record in caplog.records)  # type: ignore[attr-defined]
    assert line == {"file": "a.gguf", "penalty_repeat": "1.1"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_p", 5),
        ("top_p", 0),
        ("top_p", -0.1),
        ("top_p", "0.9"),
        ("temperature", 1e9),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_k", 2**32),
        ("top_k", 2.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("repetition_penalty", [1.1]),
    ],
)
def test_a_default_that_no_request_may_have_is_dropped_with_a_warning_that_names_it(
    model: Path, caplog: pytest.LogCaptureFixture, key: str, value: Any
) -> None:
    write_generation(model, **({"do_sample": True, "repetition_penalty": 1.25} | {key: value}))
    with caplog.at_level(logging.WARNING):
        defaults = tokenizer_from_directory(model).generation_defaults
    assert defaults == FALLBACK | ({} if key == "repetition_penalty" else {"repetition_penalty": 1.25})
    [record] = caplog.records
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["file"], fields["key"]) == ("generation_config.json", key)
    assert str(value)[:8] in fields["value"]
    assert fields["range"]


@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_end_ids_that_no_step_could_carry_are_refused_by_name(model: Path, place: str) -> None:
    ids = list(range(500))
    write_model(model, vocab_size=1000)
    if place == "config.json":
        write_config(model, vocab_size=1000, eos_token_id=ids)
    else:
        write_generation(model, eos_token_id=ids)
    refuses(model, f"{place}: eos_token_id has 500 different end ids, at most 64")


def test_end_ids_are_counted_once_each(model: Path) -> None:
    write_generation(model, eos_token_id=[7, 2] * 100)
    assert open_checkpoint(model).spec.eos_token_ids == (7, 2)


def test_end_ids_outside_of_the_vocabulary_are_refused_by_file_and_name(model: Path) -> None:
    write_generation(model, eos_token_id=[2, 32])
    refuses(model, "generation_config.json: eos_token_id: the eos id 32 lies outside of the vocabulary of 32")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("temperature", "--sampling-default temperature: could not convert"),
        ("temperature=hot", "--sampling-default temperature=hot: could not convert"),
        ("temperature=-1", "--sampling-default temperature=-1: temperature is 0 to 100"),
        ("temperature=nan", "temperature is 0 to 100"),
        ("top_p=0", "top_p is above 0 and up to 1"),
        ("presence_penalty=1", "'presence_penalty' is none of repetition_penalty, temperature"),
    ],
)
def test_a_sampling_default_that_no_request_may_have_is_refused(given: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        _ = TorchSettings(sampling_default=(given,)).sampling_defaults


def test_the_last_of_several_sampling_defaults_counts() -> None:
    settings = TorchSettings(sampling_default=("temperature=0.2", "top_k=40", "temperature=0.7"))
    assert settings.sampling_defaults == {"temperature": 0.7, "top_k": 40}


def test_a_sampling_default_of_the_executor_is_in_place_of_the_models(model: Path) -> None:
    write_generation(model, do_sample=True, temperature=0.6, top_k=20)
    files = TorchBackend(TorchConfig(model, sampling_defaults={"temperature": 0.2})).tokenizer()
    assert files.generation_defaults == {"temperature": 0.2, "top_k": 20}
