"""What a model's files say of it for people is read with bounds, and never a reason not to load it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor_service.backends.torch_backend.backend import TorchBackend
from executor_service.backends.torch_backend.config import TorchConfig
from executor_service.files.model_card import (
    MAX_ENTRIES,
    MAX_ENTRY_BYTES,
    ModelCard,
    card_of_directory,
    card_of_gguf,
)
from tests.unit.executor.model_files import write_model

README = """---
license: apache-2.0
language:
- en
- 'de'
tags: [a, "b c"]
version: "1.5"
base_model: x/y
model-index:
- name: z
  results:
  - task: {}
extra: {a: 1}
text: |
  lines
---
# A model
license: mit
"""


def test_the_header_of_a_readme_is_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    card = card_of_directory(
        tmp_path, {"license": "mit", "transformers_version": "5.0", "_name_or_path": "/x"}
    )
    assert (card.version, card.license) == ("1.5", "apache-2.0")
    assert card.metadata == {
        "language": "en, de",
        "tags": "a, b c",
        "base_model": "x/y",
        "transformers_version": "5.0",
    }


@pytest.mark.parametrize(
    "readme", [None, b"", b"# no header", b"---\nlicense: mit", b"---", b"\xff\xfe---\n"]
)
def test_without_a_header_config_json_is_read(tmp_path: Path, readme: bytes | None) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_bytes(readme)
    card = card_of_directory(tmp_path, {"license": "mit", "_commit_hash": "abc"})
    assert card == ModelCard("abc", "mit", {})


def test_hostile_cards_are_bounded(tmp_path: Path) -> None:
    lines = [f"k{number}: {'é' * 4000}" for number in range(2)] + [
        f"key{n}: \x1b[31mx{n}" for n in range(900)
    ]
    (tmp_path / "README.md").write_text("\n".join(["---", *lines, "license: [" + "x," * 900 + "]", "---"]))
    card = card_of_directory(tmp_path, {})
    assert len(card.metadata) == MAX_ENTRIES
    assert all(
        len(value.encode()) <= MAX_ENTRY_BYTES and value.isprintable() for value in card.metadata.values()
    )
    assert len(card.license.encode()) <= MAX_ENTRY_BYTES
    os.unlink(tmp_path / "README.md")
    os.mkfifo(tmp_path / "README.md")
    assert card_of_directory(tmp_path, {}) == ModelCard()


def test_the_general_keys_of_a_gguf_file_are_read() -> None:
    keys = {
        "general.architecture": "llama",
        "general.version": "v0.1",
        "general.license": "mit",
        "general.author": "A\nB",
        "general.languages": ["en", "de"],
        "general.sampling.temp": 0.5,
        "general.parameter_count": 5,
        "llama.context_length": 64,
    }
    metadata = {"author": "A B", "languages": "en, de", "parameter_count": "5"}
    assert card_of_gguf(keys) == ModelCard("v0.1", "mit", metadata)


@pytest.mark.parametrize(
    ("changes", "full", "window"),
    [
        ({}, True, 0),
        ({"model_type": "mistral", "sliding_window": 8}, False, 8),
        ({"model_type": "mistral", "sliding_window": 64}, True, 0),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            True,
            5,
        ),
    ],
)
def test_a_model_says_which_tokens_its_layers_see(
    tmp_path: Path, changes: dict[str, object], full: bool, window: int
) -> None:
    write_model(tmp_path / "m", **changes)
    backend = TorchBackend(TorchConfig(tmp_path / "m"))
    backend.load(lambda what, done: None)
    assert (backend.info.full_attention, backend.info.attention_window) == (full, window)
    assert backend.info.ranks == 1
    backend.close()
