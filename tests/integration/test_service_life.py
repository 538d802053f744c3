"""The life of a service's process, which both services have in the same way: start, drain, stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import ServiceProcess

BOTH = pytest.mark.parametrize(
    ("module", "flags"),
    [("executor_service", ["--backend", "oracle"]), ("scheduler_service", ["--executor", "127.0.0.1:9"])],
    ids=["executor", "scheduler"],
)


@contextmanager
def started(
    module: str, flags: list[str], directory: Path, stdin: int | None = None
) -> Iterator[ServiceProcess]:
    process = ServiceProcess(module, flags, directory, stdin)
    try:
        yield process
    finally:
        process.kill()


@BOTH
def test_the_first_signal_ends_an_idle_service_with_status_0(
    module: str, flags: list[str], tmp_path: Path
) -> None:
    with started(module, flags, tmp_path) as process:
        assert process.port
        assert process.terminate() == 0
        assert "draining" in process.log
        assert "stopped" in process.log.splitlines()[-1]


@BOTH
def test_a_hangup_drains_and_its_repetition_does_no_more(
    module: str, flags: list[str], tmp_path: Path
) -> None:
    with started(module, flags, tmp_path) as process:
        assert process.port
        process.signal(signal.SIGHUP)
        process.signal(signal.SIGHUP)
        assert process.wait() == 0


@BOTH
def test_a_service_does_not_outlive_the_parent_that_holds_its_standard_input(
    module: str, flags: list[str], tmp_path: Path
) -> None:
    theirs, ours = os.pipe()
    with started(module, [*flags, "--exit-with-stdin"], tmp_path, theirs) as process:
        os.close(theirs)
        assert process.port
        assert process.running
        os.close(ours)
        assert process.wait() == 0


@BOTH
def test_a_taken_port_ends_the_start_and_leaves_no_port_file_of_an_earlier_process(
    module: str, flags: list[str], tmp_path: Path
) -> None:
    with started(module, flags, tmp_path / "first") as first:
        second = tmp_path / "second"
        second.mkdir()
        (second / "port").write_text("1\n")
        with started(module, [*flags, "--port", str(first.port)], second) as process:
            assert process.wait() == os.EX_UNAVAILABLE
            assert f"can't bind 127.0.0.1:{first.port}" in process.log
            assert not (second / "port").exists()
