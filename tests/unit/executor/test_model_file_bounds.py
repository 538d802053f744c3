"""Counts in model files are bounded before what they count is read: a parser never gets to work for long."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor_service.backends.base import ModelError
from executor_service.backends.torch_backend.files import gguf_checkpoint, safetensors_dir
from executor_service.backends.torch_backend.files.architecture.spec import ModelSpec
from executor_service.backends.torch_backend.files.gguf_file import GgufFile
from executor_service.backends.torch_backend.files.safetensors_dir import SafetensorsDirectory
from executor_service.backends.torch_backend.files.stored_names import Place, place_in_gguf
from executor_service.backends.torch_backend.files.tokenizer_files import tokenizer_from_directory
from executor_service.backends.torch_backend.files.weights import open_checkpoint
from executor_service.files import safetensors_header
from tests.unit.executor.model_files import refuses, write_gguf, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return tmp_path / "model"


def never(*args: Any, **options: Any) -> Any:
    raise AssertionError("was read in spite of the bound")


def write_header(model: Path, header: bytes, size: int = 0) -> None:
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


def entries(count: int, entry: str) -> bytes:
    return ("{" + ",".join(f'"t{i}":{entry}' for i in range(count)) + "}").encode()


TENSOR = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(("count", "entry"), [(700_000, "{}"), (700_000, "0"), (250_000, TENSOR)])
def test_a_safetensors_header_of_too_many_values_is_refused_unparsed(
    model: Path, monkeypatch: pytest.MonkeyPatch, count: int, entry: str
) -> None:
    write_header(model, entries(count, entry), 4)
    monkeypatch.setattr(json, "loads", never)
    with pytest.raises(ModelError, match=r"model\.safetensors: the header: \d+ commas and colons"):
        SafetensorsDirectory(model)


def test_a_safetensors_header_of_700_000_tensors_is_refused_unread(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_header(model, entries(700_000, TENSOR), 4)
    monkeypatch.setattr(safetensors_header, "parse_json", never)
    with pytest.raises(ModelError, match=r"model\.safetensors: a header of \d+ bytes"):
        SafetensorsDirectory(model)


def test_more_tensors_than_any_model_has_are_refused_before_one_is_looked_at(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_header(model, entries(65_537, TENSOR), 4)
    monkeypatch.setattr(safetensors_header, "_entry", never)
    with pytest.raises(ModelError, match="more than 65536 tensors"):
        SafetensorsDirectory(model)


def test_a_safetensors_file_is_opened_once_however_many_tensors_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    safe_open: Callable[..., Any] = vars(safetensors_dir)["safe_open"]

    def counting(*args: object, **options: object) -> Any:
        opened.append(args)
        return safe_open(*args, **options)

    monkeypatch.setattr(safetensors_dir, "safe_open", counting)
    store = SafetensorsDirectory(model)
    for name in store.tensors:
        store.read(name)
    store.close()
    assert len(opened) == 1


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_of_too_many_values_is_refused_unparsed(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (model / name).write_bytes(b'{"a":[' + b"0," * (1 << 20) + b"0]}")
    loads: Callable[..., Any] = json.loads
    monkeypatch.setattr(json, "loads", lambda raw: never() if len(raw) > 1 << 20 else loads(raw))
    refuses(model, name, "commas and colons")


def test_a_tokenizer_of_too_many_values_is_refused_unparsed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "tokenizer.json").write_bytes(b'{"added_tokens":[' + b"0," * (4 << 20) + b"0]}")
    monkeypatch.setattr(json, "loads", lambda _raw: never())
    with pytest.raises(ModelError, match=r"tokenizer\.json: 4194305 commas and colons"):
        tokenizer_from_directory(model)


@pytest.mark.parametrize("template", [b"x" * ((1 << 20) + 1), b"\xff"])
def test_a_template_that_cannot_be_read_costs_the_chats(
    model: Path, template: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    from tokenizers import Tokenizer, models

    (model / "tokenizer.json").write_text(Tokenizer(models.BPE({"x": 0}, [])).to_str())
    (model / "chat_template.jinja").write_bytes(template)
    assert tokenizer_from_directory(model).chat_template == ""
    assert "the model has no chats" in caplog.text


def test_experts_that_a_gguf_does_not_have_are_not_enumerated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"expert_count": 4096, "expert_used_count": 1, "expert_feed_forward_length": 8}
    write_gguf(tmp_path / "x.gguf", "qwen3moe", keys=counts | {"attention.key_length": 8}, layers=1024)
    asked = 0

    def counted(spec: ModelSpec, name: str, fused: tuple[str, ...]) -> Place:
        nonlocal asked
        asked += 1
        assert asked < 100
        return place_in_gguf(spec, name, fused)

    monkeypatch.setattr(gguf_checkpoint, "place_in_gguf", counted)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.q_norm\.weight' is missing"):
        open_checkpoint(tmp_path / "x.gguf")


STRING, ARRAY, U32 = 8, 9, 4


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def array(key: str, item: int, count: int) -> bytes:
    return string(key) + struct.pack("<IIQ", ARRAY, item, count)


def write_metadata(
    path: Path, *parts: bytes, entries: int | None = None, tensors: int = 0, size: int = 0
) -> Path:
    """A GGUF file of these metadata entries, made longer without taking room on disk."""
    count = len(parts) if entries is None else entries
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + b"".join(parts))
        file.truncate(max(file.tell(), size))
    return path


@pytest.mark.parametrize("item", [STRING, U32])
def test_a_gguf_array_of_too_many_items_is_refused_before_the_first_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, item: int
) -> None:
    parts = [array("a.tokens", item, 1 << 24)]
    file = write_metadata(tmp_path / "x.gguf", *parts, size=1 << 30)
    monkeypatch.setattr(GgufFile, "_strings", never)
    with pytest.raises(ModelError, match=r"x\.gguf: metadata 'a\.tokens' claims 16777216 items"):
        GgufFile(file)


def test_gguf_arrays_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_service.backends.torch_backend.files.gguf_file._MAX_ITEMS", 1000)
    half = array("a", STRING, 600) + bytes(8 * 600)
    with pytest.raises(ModelError, match="'b' claims 600 items"):
        GgufFile(write_metadata(tmp_path / "x.gguf", half, array("b", STRING, 600) + bytes(8 * 600)))
    GgufFile(write_metadata(tmp_path / "y.gguf", half)).close()


def test_a_gguf_string_longer_than_any_header_is_refused_unread(tmp_path: Path) -> None:
    file = write_metadata(
        tmp_path / "x.gguf", string("a") + struct.pack("<IQ", STRING, 1 << 32), size=1 << 34
    )
    with pytest.raises(ModelError, match="'a' ends beyond the 134217728 bytes of a header"):
        GgufFile(file)


@pytest.mark.parametrize(("tensors", "entries"), [(65_537, 0), (0, 16_385)])
def test_a_gguf_of_too_many_tensors_or_keys_is_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: int, entries: int
) -> None:
    file = write_metadata(tmp_path / "x.gguf", entries=entries, tensors=tensors, size=1 << 30)
    monkeypatch.setattr(GgufFile, "_string", never)
    with pytest.raises(ModelError, match=f"claims {tensors} tensors and {entries} metadata entries"):
        GgufFile(file)
