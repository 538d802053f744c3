"""A model has the name of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_kit.model_name import MAX_NAME, model_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
        ("models/Qwen3-235B-Q4_K_M-00002-of-00003.gguf", "Qwen3-235B-Q4_K_M"),
        ("models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca", "Qwen3-0.6B"),
        ("hub/models--gpt2/snapshots/607a30d783dfa663caf39e06633721c8d4cfcd7e", "gpt2"),
    ],
)
def test_a_model_is_named_as_its_users_know_it(path: str, name: str, tmp_path: Path) -> None:
    assert model_name(tmp_path / path) == name


def test_the_directory_that_a_link_or_a_dot_leads_to_gives_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "Qwen3-8B"
    directory.mkdir()
    (tmp_path / "current").symlink_to(directory)
    assert model_name(tmp_path / "current") == "Qwen3-8B"
    monkeypatch.chdir(directory)
    assert model_name(Path()) == "Qwen3-8B"


def test_a_name_can_be_sent_whatever_its_bytes_are() -> None:
    assert model_name(Path("a\udcff.gguf")) == "a?"
    assert len(model_name(Path("x" * 250 + ".gguf"))) == MAX_NAME
