"""When a process that died is started again."""

from __future__ import annotations

import os
import signal

import pytest
from paceline.cli.restarts import LOOP_DEATHS, MAX_FAILED_STARTS, MAX_WRONG_STARTS, ProcessRun, Restarts

KILLED = -signal.SIGKILL


def test_the_wait_doubles_to_a_limit_and_is_forgotten_after_a_good_run() -> None:
    restarts = Restarts(first_s=1.0, max_s=4.0, good_run_s=30.0)
    short, long = ProcessRun(0.1, True, KILLED), ProcessRun(30.0, True, KILLED)
    assert [restarts.after(short).wait_s for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    assert [restarts.after(long).wait_s, restarts.after(short).wait_s] == [1.0, 2.0]


def test_a_long_life_that_never_served_is_no_good_run() -> None:
    restarts = Restarts(first_s=1.0, good_run_s=30.0)
    waits = [restarts.after(ProcessRun(100.0, False, KILLED)).wait_s for _ in range(3)]
    assert waits == [1.0, 2.0, 4.0]


def test_five_deaths_without_a_good_run_are_a_loop() -> None:
    restarts = Restarts(first_s=1.0, max_s=8.0)
    found = [restarts.after(ProcessRun(2.0, True, KILLED)) for _ in range(LOOP_DEATHS)]
    assert [restart.loop for restart in found] == [False, False, False, False, True]
    assert found[-1].within_s == 5 * 2.0 + 1 + 2 + 4 + 8
    assert not restarts.after(ProcessRun(30.0, True, KILLED)).loop


def test_what_serves_between_its_deaths_is_started_for_ever() -> None:
    restarts = Restarts()
    assert not any(restarts.after(ProcessRun(1.0, True, KILLED)).hopeless for _ in range(1000))


def test_ten_starts_in_a_row_that_never_served_are_enough() -> None:
    restarts = Restarts()
    failed = ProcessRun(1.0, False, 1)
    assert not any(restarts.after(failed).hopeless for _ in range(MAX_FAILED_STARTS - 1))
    assert not restarts.after(ProcessRun(1.0, True, 1)).hopeless
    assert not any(restarts.after(failed).hopeless for _ in range(MAX_FAILED_STARTS - 1))
    assert "10 starts in a row never served" in restarts.after(failed).hopeless


wrong_settings = pytest.mark.parametrize("status", [2, os.EX_CONFIG])


@wrong_settings
def test_an_exit_status_that_means_wrong_settings_is_final_before_it_has_served(status: int) -> None:
    assert f"exit status {status}" in Restarts().after(ProcessRun(1.0, False, status)).hopeless
    assert not Restarts().after(ProcessRun(1.0, True, status)).hopeless


@wrong_settings
def test_after_it_has_served_a_file_may_have_been_read_half_written(status: int) -> None:
    restarts, wrong = Restarts(), ProcessRun(1.0, False, status)
    restarts.after(ProcessRun(60.0, True, KILLED))
    for _ in range(MAX_WRONG_STARTS - 1):
        restarts.after(ProcessRun(1.0, False, KILLED))  # says nothing about files
    assert not any(restarts.after(wrong).hopeless for _ in range(MAX_WRONG_STARTS - 1))
    assert f"exit status {status}" in restarts.after(wrong).hopeless
