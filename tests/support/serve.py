"""`paceline serve` on the oracle, and other commands, as users run them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.support.checkout import environment
from tests.support.fork_server import Command, ForkedProcess

_START_S = 600.0  # the first start of a model on a machine compiles kernels


class Serve:
    """A running `paceline serve`."""

    def __init__(
        self, directory: Path, *arguments: str, backend: str = "oracle", port: int = 0, **variables: str
    ) -> None:
        self._port_file = directory / "port"
        self._log_file = directory / "log"
        flags = ["serve", "--backend", backend, "--port", str(port), "--port-file", str(self._port_file)]
        command = Command("paceline", [*flags, *arguments], {**environment(), **variables})
        self.process: ForkedProcess | subprocess.Popen[bytes]
        with self._log_file.open("wb") as log, open(os.devnull, "rb") as nothing:
            self.process = ForkedProcess(command, nothing.fileno(), log.fileno(), log.fileno())

    @classmethod
    def of(cls, process: subprocess.Popen[bytes], port_file: Path) -> Serve:
        """One that the test has started by itself."""
        serve = cls.__new__(cls)
        serve.process, serve._port_file, serve._log_file = process, port_file, port_file
        return serve

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """All matches of `pattern` in the log, once there are `count`."""
        deadline = time.monotonic() + _START_S
        while len(found := re.findall(pattern, self.log)) < count:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)
        return found

    @property
    def address(self) -> str:
        if self._log_file != self._port_file:
            self.wait_for(r"Serving .+ at ")
        return f"127.0.0.1:{self._port_file.read_text().strip()}"

    @property
    def executor_address(self) -> str:
        return self.wait_for(r"executor at ([\d.:]+)")[0]

    def children(self) -> dict[str, int]:
        """Process ids by service, from the operating system."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids}
        return {
            "draft" if "draft-agreement" in line else name: pid
            for pid, line in lines.items()
            for name in ("executor_service", "scheduler_service")
            if f"-m\0{name}\0" in line
        }


@contextmanager
def serving(
    directory: Path, *arguments: str, backend: str = "oracle", port: int = 0, **variables: str
) -> Iterator[Serve]:
    serve = Serve(directory, *arguments, backend=backend, port=port, **variables)
    try:
        assert serve.address
        yield serve
    finally:
        if serve.process.poll() is None:
            serve.process.send_signal(signal.SIGTERM)
            serve.process.send_signal(signal.SIGTERM)
        serve.process.wait(60)


def run(*arguments: str, stdin: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
    """`paceline` with these arguments, to its end. `extra`: environment variables."""
    command = Command("paceline", list(arguments), {**environment(), **extra})
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        process = ForkedProcess(command, given.fileno(), out.fileno(), err.fileno())
        try:
            status = process.wait(60)
        finally:
            process.kill()
        stdout, stderr = (os.pread(each.fileno(), 1 << 24, 0).decode() for each in (out, err))
    return subprocess.CompletedProcess(list(arguments), status, stdout, stderr)


def completion(door: str, model: str) -> tuple[int, dict[str, Any]]:
    """What the OpenAI API at this URL answers a model's prompt: the status, and the body. "": no model."""
    asked = {"prompt": "x", "max_tokens": 3, "temperature": 0, "logprobs": 1}
    request = Request(f"{door}/completions", json.dumps(asked | ({"model": model} if model else {})).encode())
    request.add_header("content-type", "application/json")
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
