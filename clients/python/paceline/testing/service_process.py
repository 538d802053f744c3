"""`LoopbackProcess`: one service as a child process that does not outlive this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

_STOP_S = 3.0  # after SIGTERM, until the process is killed
_LAST_LINES = 15  # of the log, in a message


class LoopbackProcess:
    """`python -m MODULE` on a free port of 127.0.0.1, with its log in a file.

    Its standard input is a pipe from this process: when this one ends, even if it is killed, the pipe is
    closed and the service ends. It has a process group of its own: Ctrl-C does not reach it, and what it
    started is killed with it.
    """

    def __init__(self, module: str, directory: Path, flags: list[str]) -> None:
        """Start it. Files are in `directory`, which is its current directory too."""
        self.name = module.removesuffix("_service")
        self._port_file, self._log_file = directory / f"{self.name}.port", directory / f"{self.name}.log"
        command = [sys.executable, "-m", module, "--host=127.0.0.1", "--port=0", "--exit-with-stdin"]
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--port-file={self._port_file}", *flags],
                cwd=directory,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def port(self) -> int:
        """The port that it listens on; 0: it does not listen yet."""
        with suppress(FileNotFoundError):
            return int(self._port_file.read_text())
        return 0

    @property
    def log(self) -> str:
        """All that it has written."""
        return self._log_file.read_text(errors="replace")

    @property
    def end(self) -> str:
        """How it ended, with the last lines of its log; "": it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        cause = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        lines = "\n".join(self.log.splitlines()[-_LAST_LINES:]) or "it said nothing"
        return f"the {self.name} ended ({cause}):\n{lines}"

    def terminate(self) -> None:
        """Ask it to end; see `reap`."""
        self._process.terminate()

    def reap(self) -> None:
        """Wait for its end; kill it and what it started if that takes too long."""
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def _environment() -> dict[str, str]:
    """This process's, without settings of Paceline, and with the modules that this process imports."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    roots = [
        str(Path(found).parent) for found in map(_directory_of, ("paceline", "executor_service")) if found
    ]
    path = dict.fromkeys([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def _directory_of(package: str) -> str:
    spec = find_spec(package)
    return "" if spec is None or spec.origin is None else str(Path(spec.origin).parent)
