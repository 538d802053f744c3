"""A service as a child process: its output, its port, its restarts, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

_POLL_S = 0.02

Say = Callable[[str, str], None]
"""Called with (name of the child, one line)."""


class ChildFailed(Exception):
    """A child ended before it could serve; the message ends with its last line."""


class Backoff:
    """How long to wait before the next start: doubling, and forgotten after a good run."""

    def __init__(self, first_s: float = 0.1, most_s: float = 10.0, good_run_s: float = 30.0) -> None:
        self._first_s, self._most_s, self._good_run_s = first_s, most_s, good_run_s
        self._next_s = first_s

    def after(self, ran_s: float) -> float:
        """The wait after a run of `ran_s` seconds."""
        if ran_s >= self._good_run_s:
            self._next_s = self._first_s
        wait_s, self._next_s = self._next_s, min(self._next_s * 2, self._most_s)
        return wait_s


class Child:
    """One service process, started again when it dies, on the port that it had first.

    `command(port)` makes its command line; it must write `port_file` once it listens, and end when
    its standard input does, lest it outlive a parent that was killed. It lives in a session of its own,
    so that a Ctrl-C of the terminal reaches the parent alone.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        port_file: Path,
        say: Say,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.port = 0
        self.starts = 0
        self._command, self._port_file, self._say = command, port_file, say
        self._env = env
        self._process: asyncio.subprocess.Process | None = None
        self._relay: asyncio.Task[None] | None = None
        self._said = ""  # the last line
        self._started = 0.0
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self, port: int) -> None:
        """Start it and wait until it listens. Raises ChildFailed."""
        self._port_file.unlink(missing_ok=True)
        await self._spawn(port)
        assert self._process is not None
        while not self._port_file.exists():
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._process.wait()
                raise ChildFailed(await self.last_words())
        self.port = int(self._port_file.read_text())

    async def keep_running(self) -> None:
        """Start it again whenever it dies, until `stop`."""
        backoff = Backoff()
        while True:
            assert self._process is not None
            status = await self._process.wait()
            if self._stopping:
                return
            wait_s = backoff.after(time.monotonic() - self._started)
            self._say(self.name, f"died ({_cause(status)}); starting it again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            if self._stopping:
                return
            await self._spawn(self.port)

    async def until_exit(self) -> None:
        """Wait for the process that runs now. Raises ChildFailed unless it was stopped."""
        assert self._process is not None
        await self._process.wait()
        if not self._stopping:
            raise ChildFailed(await self.last_words())

    async def stop(self) -> None:
        """Ask it to end (SIGTERM: it drains), and wait until it has."""
        self._stopping = True
        self._signal(signal.SIGTERM)
        if self._process is not None:
            await self._process.wait()
        if self._relay is not None:
            await self._relay

    def kill(self) -> None:
        """End it at once."""
        self._stopping = True
        self._signal(signal.SIGKILL)

    async def last_words(self) -> str:
        """Why it ended, for people."""
        assert self._process is not None
        status = await self._process.wait()
        if self._relay is not None:
            await self._relay
        return f"the {self.name} ended ({_cause(status)}): {self._said or 'it said nothing'}"

    async def _spawn(self, port: int) -> None:
        self._said = ""
        self._process = await asyncio.create_subprocess_exec(
            *self._command(port),
            stdin=asyncio.subprocess.PIPE,  # nothing is ever written: its end is our end
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **self._env},
        )
        self._started = time.monotonic()
        self.starts += 1
        assert self._process.stdout is not None
        self._relay = asyncio.create_task(self._pass_on(self._process.stdout))

    async def _pass_on(self, output: asyncio.StreamReader) -> None:
        """Say every line; a line longer than the reader's limit comes in pieces."""
        while chunk := await _line(output):
            line = chunk.decode(errors="replace").rstrip()
            self._said = line or self._said
            self._say(self.name, line)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


async def _line(output: asyncio.StreamReader) -> bytes:
    try:
        return await output.readuntil(b"\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as long:
        return await output.read(long.consumed)


def _cause(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
