"""A forked process is what `python -m` would have started, as far as tests can tell."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.checkout import environment
from tests.support.fork_server import Command, ForkedProcess


def _start(directory: Path, *arguments: str, **variables: str) -> ForkedProcess:
    command = Command("tests.unit.testing.forked", list(arguments), {**environment(), **variables})
    with (directory / "log").open("wb") as log, open(os.devnull, "rb") as nothing:
        return ForkedProcess(command, nothing.fileno(), log.fileno(), log.fileno())


def test_arguments_variables_output_and_exit_status_are_its_own(tmp_path: Path) -> None:
    process = _start(tmp_path, "exit", "7", GREETING="hello")
    assert process.wait(60) == 7
    assert process.poll() == 7
    assert (tmp_path / "log").read_text().splitlines() == ["hello exit 7", "nothing to read"]


def test_a_signal_ends_it_and_is_its_exit_status(tmp_path: Path) -> None:
    process = _start(tmp_path, "wait")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.kill()  # what has ended gets no signal


def test_it_holds_no_descriptor_of_another_one(tmp_path: Path) -> None:
    first = _start(tmp_path, "wait")
    try:
        second = _start(tmp_path, "descriptors")
        assert second.wait(60) == 0
        assert (tmp_path / "log").read_text().splitlines()[-1] == "[0, 1, 2]"
    finally:
        first.kill()
        first.wait()
