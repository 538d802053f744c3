"""One language's runner as a subprocess: a step in, its outcome out, as lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.checkout import ROOT

_BUILT = ROOT / "build" / "clients"
COMMANDS: Mapping[str, Sequence[str]] = {
    "python": (sys.executable, "-m", "tests.scenario.python_runner"),
    "node": ("node", "clients/node/scenario/run.js"),
    "go": (str(_BUILT / "go" / "scenario"),),
    "ruby": ("ruby", "-Iclients/ruby/lib", "clients/ruby/scenario/run.rb"),
    "cpp": (str(_BUILT / "cpp" / "scenario"),),
    "java": ("java", "@build/clients/java/classpath", "com.paceline.scenario.Run"),
}
"""What runs a language's steps, in the repository's root."""

TIMEOUT_S = 900.0
"""For all steps of a language. They take half a minute; where a machine is busy or freezes, minutes."""


class RunnerError(Exception):
    """A runner ended, took too long, or wrote something else than an outcome."""


class Runner:
    """A running runner."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def peak_mib(self) -> float:
        """The most memory that the runner has had so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        [kib] = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(kib) / 1024

    def run(self, step: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The lines that the runner writes for a step; the last one is the outcome. Raises RunnerError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(step), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise RunnerError("the runner has ended") from None
        while True:
            line = self._process.stdout.readline()
            if not line:
                raise RunnerError(f"the runner ended, or was ended after {TIMEOUT_S:.0f} s")
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise RunnerError(f"the runner wrote {line!r}")
            yield found
            if "received" not in found:
                return


@contextmanager
def runner(language: str, stderr: Path) -> Iterator[Runner]:
    """The runner of a language, which writes errors to the file `stderr`.

    It is killed after `TIMEOUT_S`, and must end by itself with its input.
    """
    path = os.pathsep.join((str(ROOT), str(ROOT / "clients" / "python")))
    with stderr.open("wb") as errors:
        process = subprocess.Popen(
            COMMANDS[language],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
        )
    timer = threading.Timer(TIMEOUT_S, process.kill)
    timer.start()
    try:
        yield Runner(process)
        assert process.stdin is not None
        process.stdin.close()
        if status := process.wait():
            raise RunnerError(f"the runner ended with status {status}")
    finally:
        timer.cancel()
        process.kill()
        process.wait()
