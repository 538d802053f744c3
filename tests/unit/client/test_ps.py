"""`paceline ps` finds the stacks of this user, asks each, and trusts no other user's directories."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import pytest
from paceline.channel import Link, server_options
from paceline.cli.scratch import scratch_directory, stack_directories
from paceline.scheduler.v1 import scheduler_pb2_grpc

from tests.unit.client.fake_scheduler import FakeScheduler
from tests.unit.client.test_cli import paceline


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(short)


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose command line is one of ours."""
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "paceline", "serve"]
    ) as process:
        yield process
        process.kill()


async def test_who_finds_nobody_is_told_which_stacks_run_and_which_are_starting(temporary: Path) -> None:
    nobody = await paceline("status", "--address", "127.0.0.1:1")
    assert nobody.stderr.strip().endswith("`paceline ps` finds nothing here")
    with scratch_directory() as directory, sleeper() as process:
        (directory / "scheduler").write_text("50077\n")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{directory}/scheduler.socket")
            listener.listen()
            told = await paceline("status", "--address", "127.0.0.1:1")
    assert "port 50077 of this machine is served; " in told.stderr
    assert f"process {process.pid} is starting, wait until it serves" in told.stderr


async def test_a_running_stack_is_listed_and_a_dead_one_is_not(temporary: Path) -> None:
    dead = temporary / "paceline-dead"
    dead.mkdir()
    (dead / "pid").write_text("1")
    (dead / "scheduler").write_text("50051\n")
    with scratch_directory() as directory:
        (directory / "scheduler").write_text("50077\n")
        server = grpc.aio.server(options=server_options(Link.PUBLIC))
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(FakeScheduler(), server)
        server.add_insecure_port(f"unix:{directory}/scheduler.socket")
        await server.start()
        result = await paceline("ps", "--json")
        table = await paceline("ps")
        await server.stop(None)
    [stack] = [json.loads(line) for line in result.stdout.splitlines()]
    assert (stack["pid"], stack["port"], stack["model"]) == (os.getpid(), 50077, "fake")
    assert stack["state"] == "serving"
    assert table.stdout.split()[:8] == [
        "pid",
        "port",
        "model",
        "state",
        "running",
        "waiting",
        "up",
        str(os.getpid()),
    ]


def test_a_directory_of_another_user_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch_directory() as directory:
        assert [path for _, path in stack_directories()] == [directory]
        (temporary / "paceline-link").symlink_to(directory)
        assert len(list(stack_directories())) == 1
        monkeypatch.setattr(os, "getuid", lambda: 12345678)
        assert list(stack_directories()) == []
