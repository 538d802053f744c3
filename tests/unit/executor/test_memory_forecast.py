"""What an executor will take of memory is known from its settings and its files' headers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from executor_service.memory_forecast import answer
from tests.model.default_model import default_model

GIB = 1 << 30


def test_each_line_of_settings_has_its_answer_and_wrong_ones_have_their_problem(tmp_path: Path) -> None:
    lines = [["--backend", "oracle"], ["--backend", "oracle", "--kv-memory", "1GiB"], ["--nonsense"]]
    lines.append(["--backend", "torch", "--model", str(tmp_path / "gone")])
    done = subprocess.run(
        [sys.executable, "-m", "executor_service.memory_forecast"],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True,
        text=True,
        check=True,
    )
    plain, large, wrong, gone = map(json.loads, done.stdout.splitlines())
    assert large["bytes"] - plain["bytes"] == GIB
    assert "--nonsense: no such setting" in wrong["problem"]
    assert "no file" in gone["problem"]


@pytest.mark.model
def test_a_models_plan_follows_its_weights_and_pages_and_reads_no_weights() -> None:
    model = default_model()

    def planned(*settings: str) -> int:
        found = answer(["--backend", "torch", "--device", "cpu", "--model", str(model), *settings])
        assert "problem" not in found, found
        return int(str(found["bytes"]))

    kept = {dtype: planned("--dtype", dtype) for dtype in ("blocks", "int8", "float32")}
    parameters, file_bytes = 134_515_008, model.stat().st_size
    assert kept["float32"] - kept["blocks"] == pytest.approx(4 * parameters - file_bytes, rel=0.02)
    assert kept["int8"] - kept["blocks"] == pytest.approx(1.05 * parameters - file_bytes, rel=0.2)
    assert planned("--kv-memory", "2GiB") - planned("--kv-memory", "1GiB") == GIB
    assert planned() == planned("--kv-memory", "1GiB")  # the default
    page = 16 * 23_040  # blocks have pages of 16 bits
    assert planned("--pages", "200000") - planned("--pages", "100000") == 100_000 * page
