"""A child process's exit status is what it ended with, whatever was sent to it meanwhile."""

from __future__ import annotations

import signal

from paceline.cli.child_run import ChildRun


async def test_the_exit_status_of_a_killed_child_is_known_when_it_is_terminated_too() -> None:
    for _ in range(20):  # asyncio's own `terminate` lost the status of most of them
        run = await ChildRun.begin(["sleep", "60"], {}, lambda line: None)
        run.kill_group()
        for _ in range(100):
            run.terminate()
        assert await run.exited() == -signal.SIGKILL
        await run.last_lines()
