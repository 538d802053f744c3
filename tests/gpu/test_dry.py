"""The script for the GPU runs without one, with the packages that a machine with a GPU has and no others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import hidden_packages
from tests.support.checkout import ROOT

WHEELS = hidden_packages.names_in("wheels.txt")
THERE = hidden_packages.required_by(
    hidden_packages.names_in("packages.txt"), but_for=WHEELS - {"typing-extensions"}
)
EVERY = {"device", "kernels", "check", *(f"E{n}" for n in range(13))}


def dry(out: Path, packages: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A dry run that finds these packages."""
    environment = hidden_packages.only(packages, out.parent) | {"OUT": str(out)}
    command = [sys.executable, "-m", "tests.gpu", "--dry", "--minutes", "60", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def results(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "results.json").read_text())
    return loaded


@pytest.mark.commands
def test_all_but_the_services_need_only_what_the_machine_has_and_these_need_the_wheels(
    tmp_path: Path,
) -> None:
    done = dry(out := tmp_path / "out", THERE)
    assert done.returncode == 1, done.stdout + done.stderr
    found = results(out)["experiments"]
    assert {name: found[name]["status"] for name in found} == dict.fromkeys(EVERY, "done") | {
        "E5": "left out"
    }
    assert "E5       left out" in done.stdout
    assert "not installed: grpc" in done.stdout
    assert done.stdout.splitlines()[-1] == "NOT MEASURED, or not whole: E5. Once more: --only E5"
    [ceilings] = found["E0"]["cases"]
    assert ceilings["copy_tb_s"] > 0
    steps = [case for case in found["E3"]["cases"] if case["kind"] != "capture"]
    assert len(steps) == 3 * (2 + 1)
    for case in steps:
        assert case["fraction"] == pytest.approx(case["floor_ms"] / case["step_ms"], rel=1e-4)
    for case in found["E9"]["cases"]:
        assert case["tokens_equal"]
        assert case["ratio"] == pytest.approx(case["on_ms"] / case["off_ms"], rel=1e-4)
    assert {case["family"] for case in found["check"]["cases"] if case["right"]} >= {"qwen3", "gemma3"}

    done = dry(out, THERE | WHEELS, "--only", "E5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all was measured"
    both = results(out)
    assert {name: each["status"] for name, each in both["experiments"].items()} == dict.fromkeys(
        EVERY, "done"
    )
    assert {name: each["call"] for name, each in both["experiments"].items()} == dict.fromkeys(EVERY, 0) | (
        dict.fromkeys(("device", "kernels", "E0", "E5"), 1)
    )
    assert [each["name"] for each in both["earlier"]] == ["device", "kernels", "E0", "E5"]
    assert [call["machine"]["packages"]["torch"] for call in both["calls"]] == [torch.__version__] * 2
    assert {case["way"] for case in both["experiments"]["E5"]["cases"]} == {"loop", "Generate"}
    files = list(out.iterdir())
    assert {"results.json", "roofline.png", "roofline.svg", "steps.png", "steps.svg"} == {
        f.name for f in files
    }
    assert sum(file.stat().st_size for file in files) < 16 << 20


@pytest.mark.commands
def test_without_a_compiler_of_cpu_kernels_tokens_are_compared_with_those_of_transformers(
    tmp_path: Path,
) -> None:
    done = dry(out := tmp_path / "out", THERE - {"numba", "llvmlite"}, "--only", "check")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = results(out)["experiments"]["check"]["cases"]
    skipped = {(case["family"], case["compared"].partition(", ")[2]) for case in cases if "skipped" in case}
    assert skipped == {
        *((family, "CPU backend float32") for family in ("qwen3", "gemma3", "qwen3-moe", "qwen3-gptq")),
        *((family, "CPU backend int8") for family in ("qwen3", "gemma3")),
        ("qwen3", "CPU backend float32, adapters"),
    }
    assert "qwen3-moe transformers fp32 on cpu, CPU backend float32" in done.stdout
    compared = [case for case in cases if "skipped" not in case]
    assert {case["family"] for case in compared} == {"qwen3", "gemma3", "qwen3-moe", "qwen3-gptq"}
    assert all(case["right"] and case["positions"] == 3 * 8 for case in compared)
    assert all(case["compared"].startswith("transformers fp32 on cpu, ") for case in compared)
