"""A process that is started ahead of need: it has imported everything, and waits for its secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from paceline.cli.activity import activity
from paceline.cli.child_run import ChildRun
from paceline.cli.freeze_detector import Activity

_AGAIN_S = 1.0  # before the next one, so that it does not take processors from one that has just taken over


class Spare:
    """Keeps one such process. `begin` starts it."""

    def __init__(self, begin: Callable[[], Awaitable[ChildRun]]) -> None:
        self._begin = begin
        self._run: ChildRun | None = None
        self._taken = asyncio.Event()

    async def keep(self) -> None:
        """Keep one until cancelled, and kill it then, and return at its end. One that is gone is replaced."""
        try:
            while True:
                self._taken.clear()
                with suppress(OSError):  # the system has no process left now
                    self._run = await self._begin()
                    await self._gone(self._run)
                await asyncio.sleep(_AGAIN_S)
        finally:
            if (run := self._run) is not None:
                run.kill_group()
                await run.exited()
                await run.last_lines()

    def take(self) -> ChildRun | None:
        """The process, which is the caller's from now on; None if there is none that could run."""
        if (run := self._run) is None:  # one may be beginning, which is kept
            return None
        if run.pid is None or activity(run.pid) is Activity.STOPPED:
            run.kill_group()  # `keep` waits for its end
            return None
        self._run = None
        self._taken.set()
        return run

    def kill(self) -> None:
        """Kill the process at once."""
        if self._run is not None:
            self._run.kill_group()

    async def _gone(self, run: ChildRun) -> None:
        """Wait until the process was taken, or has ended."""
        waits = [asyncio.ensure_future(run.exited()), asyncio.ensure_future(self._taken.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
