"""Experiments run in processes of their own, and their floors are those that were worked out by hand."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu import runner
from tests.gpu.bench import Bench, Case, Experiment
from tests.gpu.floors import H100, decode_floor_s, kv_bytes_per_token, prefill_floor_s, weight_bytes
from tests.gpu.shapes import spec_of

# Milliseconds at a context of 1,024 and 1, 32 and 128 rows, 3.0 TB/s and 790 TFLOP/s; weights in GB.
FLOORS = {
    "Qwen3-0.6B": (1.19, 112, (0.44, 1.65, 5.4)),
    "Qwen3-4B": (8.04, 144, (2.73, 4.3, 9.1)),
    "Qwen3-8B": (15.1, 144, (5.1, 6.7, 11.5)),
    "Qwen3-30B-A3B": (60.4, 96, (2.06, 18.8, 24.4)),
}


@pytest.mark.parametrize("name", FLOORS)
def test_decode_floors(name: str) -> None:
    spec, (weights, kv, floors) = spec_of(name), FLOORS[name]
    assert weight_bytes(spec, 10_000) / 1e9 == pytest.approx(weights, rel=0.01)
    assert kv_bytes_per_token(spec) == kv * 1024
    for rows, floor in zip((1, 32, 128), floors, strict=True):
        assert 1e3 * decode_floor_s(spec, rows, 1024, H100) == pytest.approx(floor, rel=0.03)


def test_prefill_floor() -> None:
    assert 1e3 * prefill_floor_s(spec_of("Qwen3-8B"), 2048, H100) == pytest.approx(37.6, rel=0.03)


def broken(bench: Bench) -> Iterator[Case]:
    yield {"kept": 1}
    raise ValueError("what was wrong")


def lost(bench: Bench) -> Iterator[Case]:
    yield {"kept": 1}
    os._exit(3)


def hanging(bench: Bench) -> Iterator[Case]:
    yield {"kept": 1}
    child = subprocess.Popen(["sleep", "60"])
    (bench.directory / "pid").write_text(str(child.pid))
    child.wait()
    yield {}


def incomplete(bench: Bench) -> Iterator[Case]:
    import no_such_module  # type: ignore[import-not-found]  # noqa: F401

    yield {}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_experiment_that_fails_keeps_what_it_had_and_is_alone_in_it(tmp_path: Path) -> None:
    bench = Bench(torch.device("cpu"), True, tmp_path, {})
    outcomes = {
        run.__name__: runner.run(Experiment("X", "a title", run, 60), bench, 3 if run is hanging else 60)
        for run in (broken, lost, hanging, incomplete)
    }
    kept = [{"kept": 1}]
    assert [outcomes[name].cases for name in ("broken", "lost", "hanging", "incomplete")] == [kept] * 3 + [[]]
    assert outcomes["broken"].status == "failed"
    assert outcomes["broken"].line() == "ValueError: what was wrong"
    assert (outcomes["lost"].status, outcomes["lost"].line()) == (
        "failed",
        "the process ended with exit code 3",
    )
    assert outcomes["hanging"].status == "ended"
    assert outcomes["incomplete"].status == "left out"
    assert outcomes["incomplete"].line() == "not installed: no_such_module"
    assert _gone(int((tmp_path / "pid").read_text()))


def _gone(pid: int) -> bool:
    """Whether a process ends within moments; one that nobody reaps is gone too."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
    return False
