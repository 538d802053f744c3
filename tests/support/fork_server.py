"""Starts Python processes as forks of one that has imported what they need.

The imports of a service or of the command line take 0.6 s of CPU, and the tests start hundreds. A fork has
its own interpreter, file descriptors, environment and exit status; what differs from `python -m MODULE` is
that modules are imported already, and that /proc shows the fork server's command line.

`python -m tests.support.fork_server` reads requests from the Unix socket that is its standard input. A
request is one JSON object with four descriptors: where the exit status goes, and the standard input, output
and error.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache

from tests.support.checkout import ROOT, environment

_PRELOADED = (
    "executor_service.__main__",
    "executor_service.backends.oracle_backend.oracle",
    "executor_service.backends.reference.paged_attention",
    "scheduler_service.__main__",
    "paceline.cli.app",
)
_REQUEST_BYTES = 1 << 20
_MAX_CHILDREN = 1_000


@dataclass(frozen=True)
class Command:
    """What `python -m` is told: a module, its arguments, and the whole environment."""

    module: str
    arguments: list[str]
    environment: dict[str, str]


class ForkedProcess:
    """A process of the fork server, with those parts of subprocess.Popen that tests use."""

    def __init__(self, command: Command, stdin: int, stdout: int, stderr: int) -> None:
        self._status, theirs = socket.socketpair()
        with theirs:
            request = json.dumps(asdict(command)).encode()
            socket.send_fds(_server().requests, [request], [theirs.fileno(), stdin, stdout, stderr])
        self.pid = int(self._line())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while the process runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit status, once the process has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self.returncode = int(self._line())
        self._status.close()

    def _line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            part = self._status.recv(1)
            if not part:
                raise RuntimeError("the fork server has ended")
            line += part
        return line.decode()


class _Server:
    """The fork server of this process."""

    def __init__(self) -> None:
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=theirs.fileno())
        atexit.register(self._end)

    def _end(self) -> None:
        self.requests.close()
        self._process.wait()


@cache
def _server() -> _Server:
    return _Server()


def _serve() -> Command:
    """Fork for each request; returns in the child. The server itself ends with its standard input."""
    requests = socket.socket(fileno=0)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([requests.fileno(), ended], [], [])
        if ended in readable:
            os.read(ended, _MAX_CHILDREN)
            _report(statuses)
        if requests.fileno() not in readable:
            continue
        data, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
        if not data:
            os._exit(0)
        status, *standard = descriptors
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            held = [each.detach() for each in (requests, *statuses.values())]  # or they close what is 0 now
            os.closerange(3, max(wake, *descriptors, *held) + 1)
            return Command(**json.loads(data))
        for descriptor in standard:
            os.close(descriptor)
        statuses[pid] = socket.socket(fileno=status)
        statuses[pid].send(b"%d\n" % pid)


def _report(statuses: dict[int, socket.socket]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with statuses.pop(pid) as reader, contextlib.suppress(BrokenPipeError):  # the test has gone
            reader.send(b"%d\n" % os.waitstatus_to_exitcode(status))


def main() -> None:
    """Serve, and in each fork run the module asked for."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # no terminal
        for module in _PRELOADED:
            with contextlib.suppress(ImportError):  # a fork that needs it says what is missing
                importlib.import_module(module)
            if module in sys.modules and module.endswith(".__main__"):
                del sys.modules[module]  # a fork runs it anew
    gc.freeze()  # what is imported stays shared with the forks
    command = _serve()
    os.environ.clear()
    os.environ.update(command.environment)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # it was made for the server's
    sys.argv = [command.module, *command.arguments]
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
