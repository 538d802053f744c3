"""What `serve`, `list` and `pull` know of models on this machine, and say of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paceline.cli.app import app
from paceline.cli.models.local import local_models
from paceline.cli.pull import check_model, find_model
from typer.testing import CliRunner

COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models directory with a GGUF file and a directory, beside a Hugging Face cache with one model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_MODELS", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / ".models"
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT
    refs = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "refs"
    for path in (directory / "tiny", directory / "notes", snapshot, refs):
        path.mkdir(parents=True)
    (directory / "small.Q4_1.gguf").write_bytes(bytes(2_000_000))
    (directory / "tiny" / "config.json").write_text("{}")
    (snapshot / "config.json").write_text("{}")
    (refs / "main").write_text(COMMIT)
    return directory


def test_models_are_found_by_path_by_name_and_in_the_hubs_cache(models: Path) -> None:
    assert [one.name for one in local_models()] == ["small.Q4_1", "tiny", "Qwen/Qwen3-0.6B"]
    assert find_model(str(models / "tiny")) == models / "tiny"
    assert find_model("tiny").resolve() == models / "tiny"
    assert find_model("small.Q4_1").resolve() == models / "small.Q4_1.gguf"
    assert find_model("small.Q4_1.gguf").resolve() == models / "small.Q4_1.gguf"
    assert find_model("Qwen/Qwen3-0.6B").name == COMMIT


PORT = ("--port", "0")  # the default one may be taken


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", *PORT, "meta/llama"], "`paceline pull meta/llama` fetches it"),
        (["serve", *PORT, "--model", "meta/llama"], "meta/llama is not on this machine"),
        (["serve", *PORT, "tiny", "--draft-model", "meta/llama"], "meta/llama is not on this machine"),
        (["serve", *PORT, "nobody"], "no such file or directory"),
        (["serve", *PORT, "here/nobody.gguf"], "no such file or directory"),
        (["serve", *PORT, "tiny", "--model", "tiny"], "give one of them"),
        (["pull", "llama3"], "give owner/name of a model on a hub"),
        (["pull", "http://example.com/a.gguf"], "is not an https:// address"),
        (["pull", "https://example.com/a.gguf"], "--sha256 has to be given"),
        (["pull", "https://example.com/a.bin"], "does not end with the name of a GGUF file"),
        (["rm", "llama3"], "has no model of this name"),
    ],
)
def test_a_model_that_is_not_there_is_explained_in_one_line(
    models: Path, arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (1, 2)
    [line] = result.stderr.strip().splitlines()
    assert said in line


def test_list_shows_names_sizes_and_paths(models: Path) -> None:
    lines = CliRunner().invoke(app, ["list"]).stdout.splitlines()
    assert lines[0].split() == ["small.Q4_1", "Q4_1", "2", "MB", ".models/small.Q4_1.gguf"]
    assert lines[2].startswith("Qwen/Qwen3-0.6B ")
    first = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout.splitlines()[0])
    assert (first["name"], first["bytes"]) == ("small.Q4_1", 2_000_000)


def test_parts_of_a_gguf_file_are_one_model_of_the_list(models: Path) -> None:
    parts = [models / f"big.Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(bytes(2_000_000))
    listed = CliRunner().invoke(app, ["list"]).stdout.splitlines()
    assert listed[0].split() == ["big.Q8_0", "Q8_0", "4", "MB", f".models/{parts[0].name}"]
    assert not listed[1].startswith("big")
    assert find_model("big.Q8_0").name == parts[0].name
    assert CliRunner().invoke(app, ["rm", "big.Q8_0"]).exit_code == 0
    assert not [part for part in parts if part.exists()]


def test_an_empty_list_says_how_to_get_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MODELS", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 1
    assert "paceline pull" in result.stderr


def test_what_is_no_model_is_refused_before_anything_starts(models: Path, tmp_path: Path) -> None:
    for given in (str(tmp_path), __file__):
        result = CliRunner().invoke(app, ["serve", *PORT, given])
        assert result.exit_code == 1
        assert "neither a GGUF file nor a directory with config.json" in result.stderr
    (tmp_path / "blob").write_bytes(b"GGUF")
    check_model(str(tmp_path / "blob"))  # a cache names files by their digests
