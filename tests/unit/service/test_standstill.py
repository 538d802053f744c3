"""A helper process that stands still is killed, and one that works or has no work is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from service_kit import standstill
from service_kit.procfs import ProcessState, process_state
from service_kit.standstill import LOOK_S, MAX_STILL_S, MAX_UNSEEN_S, Standstill, killed_if_still

from tests.support.processes import stop

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process does")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> list[ProcessState | None]:
    """What is seen of the process."""
    seen: list[ProcessState | None] = [ProcessState(0.0, is_runnable=False, is_stopped=False)]
    monkeypatch.setattr(standstill, "process_state", lambda _pid: seen[0])
    return seen


def looks_until_still(limit_s: float) -> int:
    return round(limit_s / LOOK_S) + 2


def test_who_uses_a_processor_or_waits_for_one_does_not_stand_still(
    state: list[ProcessState | None],
) -> None:
    one = Standstill(1)
    for count in range(3 * looks_until_still(MAX_STILL_S)):
        state[0] = ProcessState(count / 100, is_runnable=False, is_stopped=False)
        assert not one.look(LOOK_S)
    state[0] = ProcessState(99.0, is_runnable=True, is_stopped=False)
    assert not any(one.look(LOOK_S) for _ in range(3 * looks_until_still(MAX_STILL_S)))


def test_who_waits_for_something_else_or_was_stopped_stands_still(state: list[ProcessState | None]) -> None:
    one = Standstill(1)
    assert any(one.look(LOOK_S) for _ in range(looks_until_still(MAX_STILL_S)))
    state[0] = ProcessState(0.0, is_runnable=True, is_stopped=True)  # a thread may not have stopped yet
    one = Standstill(1)
    assert any(one.look(LOOK_S) for _ in range(looks_until_still(MAX_STILL_S)))


def test_time_without_work_and_pauses_of_the_watching_process_do_not_count(
    state: list[ProcessState | None],
) -> None:
    one = Standstill(1)
    for _ in range(9):
        assert not one.look(100 * MAX_STILL_S)  # the machine slept
    one = Standstill(1)
    for _ in range(3 * looks_until_still(MAX_STILL_S)):
        assert not one.look(LOOK_S)
        one.rests()


def test_where_nothing_is_seen_wall_time_decides(state: list[ProcessState | None]) -> None:
    state[0] = None
    one = Standstill(1)
    assert not any(one.look(LOOK_S) for _ in range(looks_until_still(MAX_STILL_S)))
    assert any(one.look(LOOK_S) for _ in range(looks_until_still(MAX_UNSEEN_S)))


@linux
def test_a_stopped_process_is_killed_by_the_thread_that_watches_it(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standstill, "MAX_STILL_S", 0.0)
    stop(sleeper.pid)
    with killed_if_still(sleeper) as watch:
        assert sleeper.wait() == -signal.SIGKILL
    assert watch.has_killed


@linux
def test_the_state_of_a_process_is_seen(sleeper: subprocess.Popen[bytes]) -> None:
    mine = process_state(os.getpid())
    assert mine is not None
    assert mine.is_runnable
    assert not mine.is_stopped
    assert mine.cpu_s > 0
    stop(sleeper.pid)
    stopped = process_state(sleeper.pid)
    assert stopped is not None
    assert stopped.is_stopped
    assert not stopped.is_runnable
    sleeper.kill()
    sleeper.wait()
    assert process_state(sleeper.pid) is None
