"""CUDA without a GPU: what kernels compute (interpreted) and compile to, and steps that launch nothing.

Each runs in a process of its own, since Triton is either interpreted or compiled in a whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[2]


def _run(*arguments: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    ran = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT, env=inherited | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=900, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def test_the_kernels_compute_the_right_thing_in_the_interpreter() -> None:
    two = "--numprocesses", "2", "--dist", "loadfile"
    _run("pytest", "tests/triton/interpreted", *two, "-p", "no:cacheprovider", TRITON_INTERPRET="1")


def test_the_kernels_compile_without_spills_to_matrix_instructions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = _run("tests.triton.kernel_report")
    with capsys.disabled():
        print(f"\n{table}", end="")


def test_steps_replay_graphs_that_need_neither_the_host_nor_the_compiler_nor_more_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In two processes: which graphs there are takes as long as all the rest."""
    every, graphs = "tests/triton/dry", "tests/triton/dry/test_graph_shapes.py"

    def tables(*files: str) -> str:
        return _run("pytest", *files, "-s", "-p", "no:cacheprovider", TRITON_INTERPRET="0")

    with ThreadPoolExecutor() as threads:
        parts = threads.submit(tables, every, f"--ignore={graphs}"), threads.submit(tables, graphs)
    with capsys.disabled():
        for part in parts:
            print(f"\n{part.result()}", end="")


def test_whoever_wants_more_than_a_token_costs_a_step_a_number_of_launches_that_does_not_grow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And nothing that the host waits for."""
    table = _run("tests.triton.late_launches")
    with capsys.disabled():
        print(f"\n{table}", end="")


@pytest.mark.slow
def test_the_kernels_of_every_served_model_compile_so(capsys: pytest.CaptureFixture[str]) -> None:
    table = _run("tests.triton.kernel_report", "--all")
    with capsys.disabled():
        print(f"\n{table}", end="")
