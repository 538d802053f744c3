"""Runs a service as a child process: hands over secrets, relays output, restarts and stops it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from paceline.cli.child_run import ChildRun, cause
from paceline.cli.restarts import ProcessRun, Restarts
from paceline.cli.spare import Spare
from paceline.cli.watch import Watch

_POLL_S = 0.02

Say = Callable[[str, str], None]
"""Called with (name of the child, one line of its output or about it)."""


class ChildFailed(Exception):
    """A child process did not serve, or ended. `message` is why; the text ends with its last line of output.

    Whoever has printed the output already prints `message` alone.
    """

    def __init__(self, message: str, last_line: str = "") -> None:
        super().__init__(": ".join(filter(None, (message, last_line))))
        self.message, self.last_line = message, last_line


class Child:
    """One service process, restarted on the same port when it ends or freezes.

    `command(port)` returns its command line. The process must write `port_file` once it listens, and end
    when its standard input ends, so that it does not outlive its parent. `secrets` is written to its standard
    input at each start. `watch` detects that it is frozen. It has a session of its own: Ctrl-C reaches the
    parent alone, and processes of its that outlive it are killed with its process group. `has_spare`: while
    it is kept running, another one waits for its secrets, and takes its place when it ends.
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
        has_spare: bool = False,
    ) -> None:
        self.name = name
        self.port = 0
        self.starts = 0
        self._command, self._port_file, self._say = command, port_file, say
        self._env, self._secrets, self._watch = env, secrets, watch
        self._restarts = restarts or Restarts()
        self._spare = Spare(lambda: self._begin(self.port)) if has_spare else None
        self._run: ChildRun | None = None  # the present one, or the last
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The id of the running process; None if none is running."""
        return self._run.pid if self._run else None

    async def start(self, port: int) -> None:
        """Start the process and wait until it listens. Raises ChildFailed if it ends or freezes before."""
        self._port_file.unlink(missing_ok=True)
        ending = asyncio.ensure_future(self._end(self._use(await self._begin(port))))
        try:
            while not self._port_file.exists():
                if (await asyncio.wait({ending}, timeout=_POLL_S))[0]:
                    raise await self._failed()
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
        self.port = int(self._port_file.read_text())

    async def keep_running(self) -> None:
        """Restart the process whenever it ends or freezes, until `stop`. Raises ChildFailed to give up."""
        sparing = asyncio.create_task(self._spare.keep()) if self._spare else None
        try:
            while (run := await self._successor()) is not None:
                self._use(run)
        finally:
            if sparing is not None:
                sparing.cancel()
                await asyncio.gather(sparing, return_exceptions=True)

    async def until_exit(self) -> None:
        """Wait until the present run ends. Raises ChildFailed unless `stop` or `kill` ended it."""
        assert self._run is not None
        await self._end(self._run)
        if not self._stopping:
            raise await self._failed()

    async def stop(self) -> None:
        """Send SIGTERM, on which the service drains, and wait until the process has ended."""
        self._stopping = True
        if self._run is not None:
            self._run.terminate()
            await self._end(self._run)
            await self._run.last_lines()

    def kill(self) -> None:
        """Kill the process and its process group at once."""
        self._stopping = True
        if self._run is not None:
            self._run.kill_group()
        if self._spare is not None:
            self._spare.kill()

    async def _failed(self, prefix: str = "") -> ChildFailed:
        """Wait for the process's end; its cause, and the last line of output."""
        assert self._run is not None
        status = await self._run.exited()
        await self._run.last_lines()
        said = "" if self._run.last_line else ": it said nothing"
        message = f"{prefix}the {self.name} ended ({self._run.frozen}{cause(status)}){said}"
        return ChildFailed(message, self._run.last_line)

    async def _begin(self, port: int) -> ChildRun:
        return await ChildRun.begin(self._command(port), self._env, lambda line: self._say(self.name, line))

    def _use(self, run: ChildRun) -> ChildRun:
        """Let this run be the present one: it gets its secrets."""
        self._run, run.began = run, time.monotonic()
        run.give(self._secrets)
        self.starts += 1
        return run

    async def _successor(self) -> ChildRun | None:
        """Wait for the end of the present run; the next one, or None after `stop`. Raises ChildFailed."""
        run = self._run
        assert run is not None
        said, status = await self._end(run)
        if self._stopping:
            return None
        served = run.served or self._watch is None  # without health checks, assume that it served
        restart = self._restarts.after(ProcessRun(time.monotonic() - run.began, served, status))
        if restart.hopeless:
            raise await self._failed(f"gave up: {restart.hopeless}; ")
        spare = self._spare.take() if self._spare and not restart.loop else None
        again = "another takes its place" if spare else f"starting it again in {restart.wait_s:g} s"
        if restart.loop:
            often = f"died {restart.deaths} times in {restart.within_s:.0f} s and is not serving"
            again = f"{often}; {again}; {await self._failed()}"
        self._say(self.name, f"{said}; {again}")
        if spare is not None:
            return spare
        await asyncio.sleep(restart.wait_s)
        return None if self._stopping else await self._begin(self.port)

    async def _end(self, run: ChildRun) -> tuple[str, int]:
        """Wait until a run has ended, or kill it when it is frozen; the cause, and the exit status."""
        ending = asyncio.ensure_future(run.exited())
        watching = (
            asyncio.ensure_future(self._watch(run.process_id, lambda: self._on_serving(run)))
            if self._watch
            else None
        )
        try:
            await asyncio.wait(
                {ending, *([watching] if watching else [])}, return_when=asyncio.FIRST_COMPLETED
            )
            if watching is not None and watching.done() and not ending.done():
                run.frozen = f"frozen: {watching.result()}; "
                run.kill_group()
            status = await ending
        finally:
            tasks = [task for task in (ending, watching) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        run.kill_group()
        return f"{run.frozen}died ({cause(status)})", status

    def _on_serving(self, run: ChildRun) -> None:
        """Record that a run answered a health check with SERVING."""
        if not run.served:
            run.served = True
            if self.starts > 1:
                self._say(self.name, "serves again")
