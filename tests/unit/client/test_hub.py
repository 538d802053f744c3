"""`pull` from a hub: what is fetched, what is never fetched, and what a hub that lies leaves."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from paceline.cli.app import app
from paceline.cli.models.directories import ModelFetchError
from paceline.cli.models.hub import hub_name
from paceline.cli.models.hub_files import HubFile, needed_files, quantization_of
from paceline.cli.models.local import find_local, local_models
from typer.testing import CliRunner, Result

from tests.support.fake_hub import COMMIT, FakeHub, fake_hub

TENSORS = struct.pack("<Q", 2) + b"{}" + bytes(range(256)) * 64
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": TENSORS,
    "pytorch_model.bin": b"pickle",
    "modeling_tiny.py": b"import os",
    "onnx/model.onnx": b"onnx",
    "README.md": b"# tiny",
}
FILES = {"tiny-Q4_K_M.gguf": b"GGUF" + bytes(999), "tiny-Q8_0.gguf": b"GGUF" + bytes(1999)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with fake_hub() as hub:
        hub.files = {"owner/tiny": dict(MODEL), "owner/tiny-GGUF": dict(FILES)}
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def pull(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["pull", *arguments])


def names() -> list[str]:
    return [model.name for model in local_models()]


def test_a_repository_arrives_without_what_could_be_executed(hub: FakeHub) -> None:
    result = pull("owner/tiny")
    assert result.exit_code == 0, result.stderr
    path = Path(result.stdout.strip())
    assert path.name == COMMIT
    fetched = {file.name: file.read_bytes() for file in path.iterdir()}
    wanted = ("config.json", "tokenizer.json", "model.safetensors", "README.md")
    assert fetched == {name: MODEL[name] for name in wanted}
    assert names() == ["owner/tiny"]
    assert not [asked for asked in hub.asked if asked.endswith((".py", ".bin", ".onnx"))]


def test_what_is_there_is_not_fetched_again(hub: FakeHub) -> None:
    assert pull("owner/tiny").exit_code == 0
    hub.asked.clear()
    again = pull("owner/tiny")
    assert again.exit_code == 0
    assert again.stderr.startswith("Verifying owner/tiny")
    assert [asked for asked in hub.asked if asked.startswith("GET /owner")] == []


def test_one_gguf_file_is_fetched_by_its_quantization(hub: FakeHub) -> None:
    result = pull("owner/tiny-GGUF:q4_k_m")
    assert result.exit_code == 0, result.stderr
    assert Path(result.stdout.strip()).read_bytes() == FILES["tiny-Q4_K_M.gguf"]
    assert names() == ["owner/tiny-GGUF:Q4_K_M"]
    found = find_local("owner/tiny-GGUF")
    assert found is not None
    assert found.path == Path(result.stdout.strip())


def test_a_gguf_file_in_parts_is_one_model(hub: FakeHub, tmp_path: Path) -> None:
    parts = {f"Q8_0/big-Q8_0-0000{i}-of-00003.gguf": b"GGUF" + bytes(i * 1000) for i in (1, 2, 3)}
    hub.files["owner/big-GGUF"] = {**FILES, **parts}
    hub.sent = {"Q8_0/big-Q8_0-00002-of-00003.gguf": b"GGUF"}
    assert pull("owner/big-GGUF:Q4_K_M").exit_code == 0
    assert "several GGUF files" in pull("owner/big-GGUF:Q8_0").stderr  # there is a whole one of the same name
    del hub.files["owner/big-GGUF"]["tiny-Q8_0.gguf"]
    assert "00002-of-00003.gguf has 4 bytes" in pull("owner/big-GGUF:Q8_0").stderr
    assert names() == ["owner/big-GGUF:Q4_K_M"]  # the first part comes last
    hub.sent = {}
    result = pull("owner/big-GGUF:Q8_0")
    assert result.exit_code == 0, result.stderr
    first = Path(result.stdout.strip())
    assert sorted(file.name for file in first.parent.iterdir()) == sorted(Path(part).name for part in parts)
    found = find_local("owner/big-GGUF:Q8_0")
    assert found is not None
    assert (found.path, found.format, found.size_bytes) == (first, "Q8_0", sum(map(len, parts.values())))
    assert len(names()) == 2
    assert CliRunner().invoke(app, ["rm", "owner/big-GGUF:Q8_0"]).exit_code == 0
    assert names() == ["owner/big-GGUF:Q4_K_M"]
    blobs = tmp_path / "hub" / "models--owner--big-GGUF" / "blobs"
    assert [path.stat().st_size for path in blobs.iterdir()] == [len(FILES["tiny-Q4_K_M.gguf"])]


def test_several_gguf_files_are_a_choice_that_is_left_to_the_user(hub: FakeHub) -> None:
    result = pull("owner/tiny-GGUF")
    assert result.exit_code == 1
    assert "several GGUF files" in result.stderr
    assert ":Q4_K_M, :Q8_0" in result.stderr
    assert names() == []


def test_a_download_that_was_cut_goes_on_where_it_ended(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100)
    hub.cut = {"tiny-Q8_0.gguf": 500}
    assert pull("owner/tiny-GGUF:Q8_0").exit_code == 0
    assert [asked for asked in hub.asked if "bytes=" in asked]
    assert find_local("owner/tiny-GGUF:Q8_0") is not None


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (TENSORS[:-1], "16393 bytes, where the hub lists 16394"),
        (TENSORS[:-1] + b"?", "the digest"),
        (b"", "0 bytes"),
    ],
)
def test_content_that_is_not_what_the_hub_lists_is_deleted(hub: FakeHub, sent: bytes, said: str) -> None:
    hub.sent = {"model.safetensors": sent}
    result = pull("owner/tiny")
    assert result.exit_code == 1
    [line] = [line for line in result.stderr.splitlines() if line.startswith("paceline:")]
    assert said in line
    assert names() == []
    hub.sent = {}
    assert pull("owner/tiny").exit_code == 0
    assert names() == ["owner/tiny"]


def test_a_header_of_ten_gigabytes_is_no_safetensors_file(hub: FakeHub) -> None:
    hub.files["owner/tiny"]["model.safetensors"] = struct.pack("<Q", 10 << 30) + TENSORS
    result = pull("owner/tiny")
    assert result.exit_code == 1
    assert "header would have 10737418240 bytes" in result.stderr
    assert names() == []


def test_names_that_lead_elsewhere_are_never_fetched(hub: FakeHub, tmp_path: Path) -> None:
    tricks = ("../../config.json", "/tmp/config.json", "..", "a/../b/config.json", "1_Pooling/../config.json")
    hub.files["owner/tiny"] |= dict.fromkeys(tricks, b"trick")
    assert pull("owner/tiny").exit_code == 0
    assert not [asked for asked in hub.asked if asked.startswith("GET /owner") and ".." in asked]
    assert {path.name for path in tmp_path.iterdir()} == {"hub"}


@pytest.mark.parametrize("tag", ["../../../../evil", "/tmp/evil", "a/b", "x" * 300])
def test_an_etag_that_is_no_digest_makes_no_file(hub: FakeHub, tmp_path: Path, tag: str) -> None:
    hub.etag = tag
    result = pull("owner/tiny")
    assert result.exit_code == 1
    assert "which is not its digest" in result.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_redirect_elsewhere_brings_nothing_that_the_hub_did_not_list(hub: FakeHub) -> None:
    with fake_hub() as other:
        path = f"/owner/tiny/resolve/{COMMIT}/model.safetensors"
        other.files = {"owner/tiny": {"model.safetensors": TENSORS[:-1] + b"?"}}
        hub.redirects = {path: f"{other.endpoint}{path}"}
        result = pull("owner/tiny")
    assert result.exit_code == 1
    assert "model.safetensors was not fetched" in result.stderr
    assert names() == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owner/none", "has no owner/none, or it is private"),
        ("owner/gated", "is gated: accept its terms at"),
        ("owner/pickled", "no safetensors and no GGUF files"),
        ("owner/tiny-GGUF:Q2_K", "no GGUF file :Q2_K; it has :Q4_K_M, :Q8_0"),
        ("owner/tiny:Q4_K_M", "has safetensors files and no GGUF files: leave out :Q4_K_M"),
        ("owner/parts", "has no tiny-Q4_0-00001-of-00002.gguf, a part of the GGUF file"),
        ("llama3", "give owner/name of a model on a hub"),
        ("../tiny", "give owner/name"),
    ],
)
def test_what_can_not_be_fetched_is_said_in_one_line(hub: FakeHub, name: str, said: str) -> None:
    hub.files |= {
        "owner/gated": dict(MODEL),
        "owner/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
        "owner/parts": {"tiny-Q4_0-00002-of-00002.gguf": b"GGUF"},
    }
    hub.gated = {"owner/gated"}
    result = pull(name)
    assert result.exit_code in (1, 2)
    [line] = [line for line in result.stderr.splitlines() if line.startswith("paceline:")]
    assert said in line
    assert names() == []


def test_without_a_network_the_sentence_names_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    result = pull("owner/tiny")
    assert result.exit_code == 1
    assert "owner/tiny could not be fetched from http://127.0.0.1:9" in result.stderr


def test_a_model_of_the_hub_is_removed_with_its_content(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("owner/tiny", "owner/tiny-GGUF:Q4_K_M", "owner/tiny-GGUF:Q8_0"):
        assert pull(name).exit_code == 0
    assert CliRunner().invoke(app, ["rm", "owner/tiny-GGUF:Q8_0"]).exit_code == 0
    assert names() == ["owner/tiny", "owner/tiny-GGUF:Q4_K_M"]
    blobs = tmp_path / "hub" / "models--owner--tiny-GGUF" / "blobs"
    assert [path.stat().st_size for path in blobs.iterdir()] == [len(FILES["tiny-Q4_K_M.gguf"])]
    assert CliRunner().invoke(app, ["rm", "owner/tiny"]).exit_code == 0
    assert CliRunner().invoke(app, ["rm", "owner/tiny"]).exit_code == 1
    assert not (tmp_path / "hub" / "models--owner--tiny").exists()


def test_names_of_a_hub_have_a_revision_and_a_quantization() -> None:
    name = hub_name("Qwen/Qwen3-0.6B-GGUF@v1.0:Q8_0")
    assert name == ("Qwen/Qwen3-0.6B-GGUF", "v1.0", "Q8_0")
    assert hub_name("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", "main", "")
    for other in ("Qwen3", "a/b/c", "./model", "a/model.gguf", "a/b@../x", "a/b:", "a/b@x/y"):
        assert hub_name(other) is None


def test_weights_of_the_usual_name_are_preferred_and_the_config_comes_last() -> None:
    paths = ("config.json", "consolidated.safetensors", "model-1.safetensors", "tokenizer.json")
    needed = needed_files([HubFile(path, 1, "", "0") for path in paths])
    assert [file.path for file in needed] == ["model-1.safetensors", "tokenizer.json", "config.json"]
    with pytest.raises(ModelFetchError, match=r"no config\.json"):
        needed_files([HubFile("model.safetensors", 1, "", "0")])


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("a/x.IQ4_XS.gguf", "IQ4_XS"),
        ("x-f16.gguf", "f16"),
        ("x-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("Q-model.gguf", "Q-model"),
        ("x-Q6_K-00002-of-00004.gguf", "Q6_K"),
    ],
)
def test_a_gguf_files_quantization_is_the_end_of_its_name(path: str, label: str) -> None:
    assert quantization_of(path) == label
