"""Runs a service as a child process: hands over secrets, relays output, restarts and stops it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from paceline.cli.restarts import ProcessRun, Restarts
from paceline.cli.watch import Watch

_POLL_S = 0.02
_LAST_LINES_S = 1.0  # wait for the rest of the output, which the child's own children may keep open
_PRIVATE_VARIABLES = ("PACELINE_TOKEN",)  # processes get it through a pipe

Say = Callable[[str, str], None]
"""Called with (name of the child, one line of its output or about it)."""


class ChildFailed(Exception):
    """A child process did not serve, or ended; the message has the last line of its output."""


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


class Child:
    """One service process, restarted on the same port when it ends or freezes.

    `command(port)` returns its command line. The process must write `port_file` once it listens, and end
    when its standard input ends, so that it does not outlive its parent. `secrets` is written to its standard
    input at each start. `watch` detects that it is frozen. It has a session of its own: Ctrl-C reaches the
    parent alone, and processes of its that outlive it are killed with its process group.
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
        self._group = 0  # id of the process and of its group; 0: nothing to kill
        self._last_line = ""  # of the output
        self._started = 0.0  # time.monotonic()
        self._served = False  # whether the present run was ever SERVING
        self._frozen = ""  # the reason, if the present run was killed because it was frozen
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The id of the running process; None if none is running."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self, port: int) -> None:
        """Start the process and wait until it listens. Raises ChildFailed if it ends before."""
        self._port_file.unlink(missing_ok=True)
        await self._spawn(port)
        assert self._process is not None
        while not self._port_file.exists():
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._exited()
                raise ChildFailed(await self.exit_message())
        self.port = int(self._port_file.read_text())

    async def keep_running(self) -> None:
        """Restart the process whenever it ends or freezes, until `stop`. Raises ChildFailed to give up."""
        while True:
            cause, status = await self._end()
            if self._stopping:
                return
            served = self._served or self._watch is None  # without health checks, assume that it served
            run = ProcessRun(time.monotonic() - self._started, served, status)
            restart = self._restarts.after(run)
            if restart.hopeless:
                raise ChildFailed(f"gave up: {restart.hopeless}; {await self.exit_message()}")
            again = f"starting it again in {restart.wait_s:g} s"
            if restart.loop:
                often = f"died {restart.deaths} times in {restart.within_s:.0f} s and is not serving"
                again = f"{often}; {again}; {await self.exit_message()}"
            self._say(self.name, f"{cause}; {again}")
            await asyncio.sleep(restart.wait_s)
            if self._stopping:
                return
            await self._spawn(self.port)

    async def until_exit(self) -> None:
        """Wait until the present run ends. Raises ChildFailed unless `stop` or `kill` ended it."""
        await self._end()
        if not self._stopping:
            raise ChildFailed(await self.exit_message())

    async def stop(self) -> None:
        """Send SIGTERM, on which the service drains, and wait until the process has ended."""
        self._stopping = True
        self._signal(signal.SIGTERM)
        if self._process is not None:
            await self._end()
        await self._last_lines()

    def kill(self) -> None:
        """Kill the process and its process group at once."""
        self._stopping = True
        self._kill_group()

    async def exit_message(self) -> str:
        """Wait for the process's end; a message with its cause and the last line of output."""
        status = await self._exited()
        await self._last_lines()
        last_line = self._last_line or "it said nothing"
        return f"the {self.name} ended ({self._frozen}{_cause(status)}): {last_line}"

    async def _spawn(self, port: int) -> None:
        self._last_line = ""
        self._served, self._frozen = False, ""
        inherited = {name: value for name, value in os.environ.items() if name not in _PRIVATE_VARIABLES}
        loop = asyncio.get_running_loop()
        transport, self._exit = await loop.subprocess_exec(
            _Exit,
            *self._command(port),
            stdin=asyncio.subprocess.PIPE,  # stays open after the secrets, and ends when this process does
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
        """Wait for the end of the present run; its exit status."""
        assert self._process is not None
        assert self._exit is not None
        await self._exit.happened.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    async def _end(self) -> tuple[str, int]:
        """Wait until the process has ended, or kill it when it is frozen; the cause, and the exit status."""
        process = self._process
        assert process is not None
        ending = asyncio.ensure_future(self._exited())
        watching = asyncio.ensure_future(self._watch(process.pid, self._on_serving)) if self._watch else None
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

    def _on_serving(self) -> None:
        """Record that the present run answered a health check with SERVING."""
        if not self._served:
            self._served = True
            if self.starts > 1:
                self._say(self.name, "serves again")

    def _kill_group(self) -> None:
        """Kill what is left of the process's group; the process itself may have ended."""
        if self._group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
        if self.pid is None:
            self._group = 0  # the system may give the id to another process from now on

    async def _last_lines(self) -> None:
        if self._relay is not None:
            await asyncio.wait({self._relay}, timeout=_LAST_LINES_S)

    async def _pass_on(self, output: asyncio.StreamReader) -> None:
        """Relay every line of output; a line longer than the reader's limit is relayed in pieces."""
        while chunk := await _line(output):
            line = chunk.decode(errors="replace").rstrip()
            self._last_line = line or self._last_line
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
