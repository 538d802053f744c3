"""What runs beside the rest of loading gives its result, error and progress, and ends with the rest."""

from __future__ import annotations

from threading import Event

import pytest

from executor_service.backends.base import Progress
from executor_service.backends.torch_backend.files.loading_thread import Beside


def test_a_task_runs_while_the_block_does_and_its_progress_is_passed_on() -> None:
    begun, told = Event(), list[tuple[str, float]]()

    def task(progress: Progress) -> int:
        progress("hashing", 0.5)
        begun.set()
        return 7

    with Beside(task) as beside:
        assert begun.wait(30)  # nobody has asked for the result yet
        assert beside.result(lambda what, done: told.append((what, done))) == 7
    assert told in ([], [("hashing", 0.5)])  # it may have been done already


def test_the_error_of_a_task_is_raised_where_its_result_is_asked_for() -> None:
    def task(progress: Progress) -> int:
        raise OSError("gone")

    with Beside(task) as beside, pytest.raises(OSError, match="gone"):
        beside.result(lambda what, done: None)


def test_an_error_of_the_block_ends_the_task_at_its_next_progress() -> None:
    ended = Event()

    def task(progress: Progress) -> None:
        try:
            while True:
                progress("hashing", 0.0)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="of the block"), Beside(task):
        raise ValueError("of the block")
    assert ended.is_set()
