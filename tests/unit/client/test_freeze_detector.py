"""When a service process counts as frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from paceline.cli.activity import activity
from paceline.cli.pulse import Activity, Patience, Pulse
from paceline.service.clock import RunningClock

PATIENCE = Patience(stopped_s=4, idle_s=10, busy_s=30, starting_s=300)
TICK_S = 0.25


class Life:
    """A process that is looked at four times a second, and does not answer unless told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pulse = Pulse(self.now, PATIENCE)

    def answers(self) -> None:
        self.pulse.answered(self.now)

    def silent(self, seconds: float, activity: Activity) -> str | None:
        """The verdict after so many more seconds of silence; a probe is missed every two."""
        for tick in range(1, round(seconds / TICK_S) + 1):
            self.now += TICK_S
            if tick % 8 == 0:
                self.pulse.missed()
            if (verdict := self.pulse.look(self.now, activity)) is not None:
                return verdict
        return None


@pytest.fixture
def life() -> Life:
    life = Life()
    life.answers()
    return life


def test_a_stopped_process_is_frozen_after_four_seconds(life: Life) -> None:
    assert life.silent(3.5, Activity.STOPPED) is None
    assert life.silent(1, Activity.STOPPED) == "stopped by a signal for 4 s"


def test_a_process_that_is_stopped_again_and_again_is_not_frozen(life: Life) -> None:
    for _ in range(20):
        assert life.silent(3, Activity.STOPPED) is None
        assert life.silent(0.5, Activity.IDLE) is None
        life.answers()


def test_an_idle_process_that_does_not_answer_is_frozen_after_ten_seconds(life: Life) -> None:
    assert life.silent(9.5, Activity.IDLE) is None
    assert life.silent(1, Activity.IDLE) == "no answer for 10 s"


@pytest.mark.parametrize("activity", [Activity.BUSY, Activity.UNKNOWN])
def test_a_busy_process_has_longer(life: Life, activity: Activity) -> None:
    assert life.silent(29.5, activity) is None
    assert life.silent(1, activity) == "no answer for 30 s"


def test_each_answer_begins_anew(life: Life) -> None:
    for _ in range(10):
        assert life.silent(9, Activity.IDLE) is None
        life.answers()


def test_one_late_answer_is_no_freeze(life: Life) -> None:
    life.now += 60  # however long: too few probes were missed
    life.pulse.missed()
    assert life.pulse.look(life.now, Activity.IDLE) is None


def test_a_process_that_has_not_answered_yet_may_import_for_minutes() -> None:
    life = Life()
    assert life.silent(299, Activity.IDLE) is None
    assert life.silent(2, Activity.IDLE) == "no answer for 300 s"


def test_a_debugger_may_hold_it_for_ever(life: Life) -> None:
    assert life.silent(100_000, Activity.TRACED) is None
    assert life.silent(9, Activity.IDLE) is None


def test_a_watcher_that_was_stopped_itself_begins_its_patience_anew() -> None:
    now = [0.0]
    clock = RunningClock(lambda: now[0], cap_s=0.5)
    pulse = Pulse(clock(), PATIENCE)
    pulse.answered(clock())
    for _ in range(20):  # all are stopped for an hour, and it looks before the other has gone on
        now[0] += 3600
        assert pulse.look(clock(), Activity.STOPPED) is None
        pulse.missed()
        now[0] += TICK_S
        assert pulse.look(clock(), Activity.IDLE) is None
        pulse.answered(clock())


def test_the_system_tells_stopped_from_running_from_waiting() -> None:
    program = "import sys; print('ready', flush=True); sys.stdin.readline()\nwhile True: pass"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            _until(process.pid, Activity.IDLE)
            process.send_signal(signal.SIGSTOP)
            _until(process.pid, Activity.STOPPED)
            process.send_signal(signal.SIGCONT)
            process.stdin.write("go on\n")
            process.stdin.flush()
            _until(process.pid, Activity.BUSY)
        finally:
            process.kill()


def _until(pid: int, wanted: Activity) -> None:
    while activity(pid) is not wanted:
        os.sched_yield()


def test_a_process_that_is_gone_is_unknown() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert activity(process.pid) is Activity.UNKNOWN
