"""A process that is started ahead of need is used once, or killed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from paceline.cli import spare
from paceline.cli.child_run import ChildRun
from paceline.cli.spare import Spare


class FakeRun:
    """A process that lives until it is killed. `waited`: set once somebody waits for its end."""

    def __init__(self, waited: asyncio.Event) -> None:
        self.pid, self.killed, self._waited = 1, asyncio.Event(), waited

    async def exited(self) -> None:
        self._waited.set()
        await self.killed.wait()

    async def last_lines(self) -> None:
        pass

    def kill_group(self) -> None:
        self.killed.set()


async def test_one_that_is_asked_for_while_it_begins_is_kept_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spare, "activity", lambda pid: None)
    runs: list[FakeRun] = []
    beginning, begun, waited = (asyncio.Event() for _ in range(3))

    async def begin() -> ChildRun:
        beginning.set()
        await begun.wait()
        runs.append(FakeRun(waited))
        return cast(Any, runs[-1])

    one = Spare(begin)
    keeping = asyncio.create_task(one.keep())
    await beginning.wait()
    assert one.take() is None
    begun.set()
    await waited.wait()
    assert cast(Any, one.take()) is runs[0]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert [run.killed.is_set() for run in runs[1:]] == [True] * len(runs[1:])
    assert not runs[0].killed.is_set()  # it is the taker's
