"""Tiny models of families with sinks, windows, layers without positions and sigmoid routers are exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.exactness import exact, written


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "mxfp4", "gemma3", "smollm3", "glm4_moe"])
def test_ids_are_the_same_whatever_happens_to_a_request(name: str, tmp_path: Path) -> None:
    assert exact(written(name, tmp_path / "model"), tmp_path / "stack", {"threads": "1"})
