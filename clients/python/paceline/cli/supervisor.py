"""A service as a child process: its secrets, its output, its port, its restarts, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from paceline.cli.restarts import Life, Restarts
from paceline.cli.watch import Watch

_POLL_S = 0.02
_LAST_LINES_S = 1.0  # a process may leave its output open to others, which live on
_PRIVATE_VARIABLES = ("PACELINE_TOKEN",)  # a client's; services get theirs through a pipe

Say = Callable[[str, str], None]
"""Called with (name of the child, one line)."""


class ChildFailed(Exception):
    """A child does not get to serve, or does not stay; the message ends with its last line."""


class _Exit(asyncio.subprocess.SubprocessStreamProtocol):
    """Tells of the process's end. `Process.wait` waits for its output's too, which others may hold open."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 16, loop=asyncio.get_running_loop())
        self.happened = asyncio.Event()

    def process_exited(self) -> None:
        """Called once."""
        super().process_exited()
        self.happened.set()


class Child:
    """One service process, started again when it dies or freezes, on the port that it had first.

    `command(port)` makes its command line; it must write `port_file` once it listens, and end when
    its standard input does, lest it outlive a parent that was killed. `secrets` is written to its
    standard input at each start. `watch` tells when it is frozen. It lives in a session of its own, so
    that a Ctrl-C of the terminal reaches the parent alone, and what it leaves behind ends with it.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        port_file: Path,
        say: Say,
        *,
        env: Mapping[str, str] = MappingProxyType({}),
        secrets: bytes = b"",
        watch: Watch | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        self.name = name
        self.port = 0
        self.starts = 0
        self._command, self._port_file, self._say = command, port_file, say
        self._env, self._secrets, self._watch = env, secrets, watch
        self._restarts = restarts or Restarts()
        self._process: asyncio.subprocess.Process | None = None
        self._exit: _Exit | None = None
        self._relay: asyncio.Task[None] | None = None
        self._group = 0  # the process's id and its group's; 0: none to end
        self._said = ""  # the last line
        self._started = 0.0
        self._served = False  # in this life
        self._frozen = ""  # why it was ended, if it had to be
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
                    await self._exited()
                raise ChildFailed(await self.last_words())
        self.port = int(self._port_file.read_text())

    async def keep_running(self) -> None:
        """Start it again whenever it dies or freezes, until `stop`. Raises ChildFailed if that is in vain."""
        while True:
            cause, status = await self._end()
            if self._stopping:
                return
            served = self._served or self._watch is None  # who never asks can't know
            life = Life(time.monotonic() - self._started, served, status)
            restart = self._restarts.after(life)
            if restart.hopeless:
                raise ChildFailed(f"gave up: {restart.hopeless}; {await self.last_words()}")
            again = f"starting it again in {restart.wait_s:g} s"
            if restart.loop:
                often = f"died {restart.deaths} times in {restart.within_s:.0f} s and is not serving"
                again = f"{often}; {again}; {await self.last_words()}"
            self._say(self.name, f"{cause}; {again}")
            await asyncio.sleep(restart.wait_s)
            if self._stopping:
                return
            await self._spawn(self.port)

    async def until_exit(self) -> None:
        """Wait for the process that runs now. Raises ChildFailed unless it was stopped."""
        await self._end()
        if not self._stopping:
            raise ChildFailed(await self.last_words())

    async def stop(self) -> None:
        """Ask it to end (SIGTERM: it drains), and wait until it has."""
        self._stopping = True
        self._signal(signal.SIGTERM)
        if self._process is not None:
            await self._end()
        await self._last_lines()

    def kill(self) -> None:
        """End it at once."""
        self._stopping = True
        self._kill_group()

    async def last_words(self) -> str:
        """Why it ended, for people."""
        status = await self._exited()
        await self._last_lines()
        return f"the {self.name} ended ({self._frozen}{_cause(status)}): {self._said or 'it said nothing'}"

    async def _spawn(self, port: int) -> None:
        self._said = ""
        self._served, self._frozen = False, ""
        inherited = {name: value for name, value in os.environ.items() if name not in _PRIVATE_VARIABLES}
        loop = asyncio.get_running_loop()
        transport, self._exit = await loop.subprocess_exec(
            _Exit,
            *self._command(port),
            stdin=asyncio.subprocess.PIPE,  # behind the secrets nothing is ever written: its end is our end
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**inherited, **self._env},
        )
        self._process = asyncio.subprocess.Process(transport, self._exit, loop)
        self._group = self._process.pid
        self._started = time.monotonic()
        self.starts += 1
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(self._secrets)
        self._relay = asyncio.create_task(self._pass_on(self._process.stdout))

    async def _exited(self) -> int:
        """Wait for the end of the process that runs now; its exit status."""
        assert self._process is not None
        assert self._exit is not None
        await self._exit.happened.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    async def _end(self) -> tuple[str, int]:
        """Wait until the process has died, or end it when it is frozen; the cause, and the exit status."""
        process = self._process
        assert process is not None
        ending = asyncio.ensure_future(self._exited())
        watching = asyncio.ensure_future(self._watch(process.pid, self._heard)) if self._watch else None
        try:
            await asyncio.wait(
                {ending, *([watching] if watching else [])}, return_when=asyncio.FIRST_COMPLETED
            )
            if watching is not None and watching.done() and not ending.done():
                self._frozen = f"frozen: {watching.result()}; "
                self._kill_group()
            status = await ending
        finally:
            tasks = [task for task in (ending, watching) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._kill_group()
        return f"{self._frozen}died ({_cause(status)})", status

    def _heard(self, serving: bool) -> None:
        """An answer of the process that runs now."""
        if serving and not self._served:
            self._served = True
            if self.starts > 1:
                self._say(self.name, "serves again")

    def _kill_group(self) -> None:
        """End the process, and whatever it has started and left behind, at once."""
        if self._group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
        if self.pid is None:
            self._group = 0  # from here on the number may be somebody else's

    async def _last_lines(self) -> None:
        if self._relay is not None:
            await asyncio.wait({self._relay}, timeout=_LAST_LINES_S)

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
