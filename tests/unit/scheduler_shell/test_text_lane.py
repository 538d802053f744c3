"""Callers share a lane of the tokenizer: turns, jobs and bytes."""

from __future__ import annotations

import asyncio

import pytest

from scheduler_service.text.errors import BusyError
from scheduler_service.text.job import TextJob
from scheduler_service.text.lane_queue import LaneQueue


def job(caller: str, size: int = 1) -> TextJob:
    return TextJob({}, b"x" * size, 0, asyncio.get_running_loop().create_future(), caller)


async def test_callers_take_turns_and_each_ones_jobs_stay_in_order() -> None:
    lane = LaneQueue(100, 1000)
    jobs = [job("many") for _ in range(3)] + [job("few")]
    for one in jobs:
        lane.enter(one)
    begun = [lane.next() for _ in jobs]
    assert begun == [jobs[0], jobs[3], jobs[1], jobs[2]]
    assert not lane


async def test_one_caller_may_have_half_of_a_lane_so_that_another_finds_room() -> None:
    lane = LaneQueue(8, 1000)
    flood = [job("flood") for _ in range(4)]
    for one in flood:
        lane.enter(one)
    with pytest.raises(BusyError, match="of this caller"):
        lane.enter(job("flood"))
    lane.enter(job("polite"))
    for one in flood:
        lane.leave(one)
    assert lane.next().caller == "polite"
    assert not lane


async def test_bytes_are_shared_as_jobs_are() -> None:
    lane = LaneQueue(100, 80)
    lane.enter(job("flood", 40))
    with pytest.raises(BusyError, match="of this caller"):
        lane.enter(job("flood", 1))
    lane.enter(job("polite", 20))


async def test_all_together_are_bounded() -> None:
    lane = LaneQueue(4, 1000)
    for caller in ("a", "a", "b", "c"):
        lane.enter(job(caller))
    with pytest.raises(BusyError, match="too much text waits"):
        lane.enter(job("d"))


async def test_a_job_that_is_put_back_goes_first_and_running_jobs_count() -> None:
    lane = LaneQueue(4, 1000)
    first, second = job("a"), job("b")
    lane.enter(first)
    lane.enter(second)
    running = lane.next()
    assert running is first
    lane.put_back(first)
    assert lane.next() is first
    lane.leave(first)
    assert lane.next() is second
    with pytest.raises(KeyError):
        lane.next()
