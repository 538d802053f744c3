"""One run of a child process: its output, its end, and what is left of its process group."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

_LAST_LINES_S = 1.0  # wait for the rest of the output, which the child's own children may keep open
_PRIVATE_VARIABLES = ("PACELINE_TOKEN",)  # processes get it through a pipe


class _Exit(asyncio.subprocess.SubprocessStreamProtocol):
    """Sets `happened` when the process ends.

    `Process.wait` waits for the end of the output too, which the child's own children may keep open.
    """

    def __init__(self) -> None:
        super().__init__(limit=1 << 16, loop=asyncio.get_running_loop())
        self.happened = asyncio.Event()

    def process_exited(self) -> None:
        """Called by asyncio once."""
        super().process_exited()
        self.happened.set()


class ChildRun:
    """A process from its start to its end, in a session of its own.

    `on_line` is called with every line of its output. `began`, `served`, `frozen`: its supervisor's.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, exit_: _Exit, on_line: Callable[[str], None]
    ) -> None:
        assert process.stdout is not None
        self.began = time.monotonic()  # when it was given its secrets
        self.served = False  # whether it was ever SERVING
        self.frozen = ""  # the reason, if it was killed because it was frozen
        self.last_line = ""  # of the output
        self.process_id = process.pid
        self._process, self._exit, self._on_line = process, exit_, on_line
        self._group = self.process_id  # 0: nothing to kill
        self._relay = asyncio.create_task(self._pass_on(process.stdout))

    @classmethod
    async def begin(
        cls, command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]
    ) -> ChildRun:
        """Start a process, with this process's environment and `env`. Raises OSError."""
        inherited = {name: value for name, value in os.environ.items() if name not in _PRIVATE_VARIABLES}
        loop = asyncio.get_running_loop()
        transport, exit_ = await loop.subprocess_exec(
            _Exit,
            *command,
            stdin=asyncio.subprocess.PIPE,  # stays open after the secrets, and ends when this process does
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**inherited, **env},
        )
        return cls(asyncio.subprocess.Process(transport, exit_, loop), exit_, on_line)

    @property
    def pid(self) -> int | None:
        """The process's id; None once it has ended."""
        return self._process.pid if self._process.returncode is None else None

    def give(self, secrets: bytes) -> None:
        """Write to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(secrets)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        send_signal(self._process, signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill what is left of the process's group; the process itself may have ended."""
        if self._group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
        if self.pid is None:
            self._group = 0  # the system may give the id to another process from now on

    async def exited(self) -> int:
        """Wait for its end; its exit status."""
        await self._exit.happened.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    async def last_lines(self) -> None:
        """Wait for the rest of the output of a process that has ended."""
        await asyncio.wait({self._relay}, timeout=_LAST_LINES_S)

    async def _pass_on(self, output: asyncio.StreamReader) -> None:
        """Relay every line of output; a line longer than the reader's limit is relayed in pieces."""
        while chunk := await _line(output):
            line = chunk.decode(errors="replace").rstrip()
            self.last_line = line or self.last_line
            self._on_line(line)


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended.

    asyncio's own `send_signal`, `terminate` and `kill` first ask whether the process has ended, which takes
    the exit status away from asyncio's watcher: the status is then 255, with a warning in the log.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def cause(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


async def _line(output: asyncio.StreamReader) -> bytes:
    try:
        return await output.readuntil(b"\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as long:
        return await output.read(long.consumed)
