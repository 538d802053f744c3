"""When a service process counts as frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from paceline.cli.activity import activity
from paceline.cli.freeze_detector import Activity, FreezeDetector, SilenceLimits
from service_kit.clock import RunningClock

LIMITS = SilenceLimits(stopped_s=4, idle_s=10, busy_s=30, starting_s=300)
TICK_S = 0.25


class WatchedRun:
    """A process that is looked at four times a second, and does not answer unless told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.detector = FreezeDetector(self.now, LIMITS)

    def answers(self) -> None:
        self.detector.answered(self.now)

    def silent(self, seconds: float, activity: Activity) -> str | None:
        """The verdict after so many more seconds of silence; a probe is missed every two."""
        for tick in range(1, round(seconds / TICK_S) + 1):
            self.now += TICK_S
            if tick % 8 == 0:
                self.detector.missed()
            if (verdict := self.detector.freeze_reason(self.now, activity)) is not None:
                return verdict
        return None


@pytest.fixture
def run() -> WatchedRun:
    run = WatchedRun()
    run.answers()
    return run


def test_a_stopped_process_is_frozen_after_four_seconds(run: WatchedRun) -> None:
    assert run.silent(3.5, Activity.STOPPED) is None
    assert run.silent(1, Activity.STOPPED) == "stopped by a signal for 4 s"


def test_a_process_that_is_stopped_again_and_again_is_not_frozen(run: WatchedRun) -> None:
    for _ in range(20):
        assert run.silent(3, Activity.STOPPED) is None
        assert run.silent(0.5, Activity.IDLE) is None
        run.answers()


def test_an_idle_process_that_does_not_answer_is_frozen_after_ten_seconds(run: WatchedRun) -> None:
    assert run.silent(9.5, Activity.IDLE) is None
    assert run.silent(1, Activity.IDLE) == "no answer for 10 s"


@pytest.mark.parametrize("activity", [Activity.BUSY, Activity.UNKNOWN])
def test_a_busy_process_has_longer(run: WatchedRun, activity: Activity) -> None:
    assert run.silent(29.5, activity) is None
    assert run.silent(1, activity) == "no answer for 30 s"


def test_each_answer_begins_anew(run: WatchedRun) -> None:
    for _ in range(10):
        assert run.silent(9, Activity.IDLE) is None
        run.answers()


def test_one_late_answer_is_no_freeze(run: WatchedRun) -> None:
    run.now += 60  # however long: too few probes were missed
    run.detector.missed()
    assert run.detector.freeze_reason(run.now, Activity.IDLE) is None


def test_a_process_that_has_not_answered_yet_may_import_for_minutes() -> None:
    run = WatchedRun()
    assert run.silent(299, Activity.IDLE) is None
    assert run.silent(2, Activity.IDLE) == "no answer for 300 s"


def test_a_debugger_may_hold_it_for_ever(run: WatchedRun) -> None:
    assert run.silent(100_000, Activity.TRACED) is None
    assert run.silent(9, Activity.IDLE) is None


def test_a_watcher_that_was_stopped_itself_begins_its_patience_anew() -> None:
    now = [0.0]
    clock = RunningClock(lambda: now[0], cap_s=0.5)
    detector = FreezeDetector(clock(), LIMITS)
    detector.answered(clock())
    for _ in range(20):  # all are stopped for an hour, and it looks before the other has gone on
        now[0] += 3600
        assert detector.freeze_reason(clock(), Activity.STOPPED) is None
        detector.missed()
        now[0] += TICK_S
        assert detector.freeze_reason(clock(), Activity.IDLE) is None
        detector.answered(clock())


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
