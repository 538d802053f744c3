"""A scheduler ends when one of its tasks fails, instead of continuing without it."""

from __future__ import annotations

import asyncio

import pytest
from service_kit.identity import Identity

from scheduler_service.config import SchedulerSettings
from scheduler_service.core.step import Capacity
from scheduler_service.errors import ErrorReason
from scheduler_service.link.pool import Served
from scheduler_service.model import ServiceState
from scheduler_service.rpc.codec.requests import check_request
from scheduler_service.service import SchedulerService, _endless
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.models_made_here import DRAFTING, MODEL
from tests.unit.scheduler_shell.test_request_codec import ids


async def shown(healthy: bool) -> None:
    assert not healthy


CALLER = Identity("ours", "token")


def service() -> SchedulerService:
    return SchedulerService(SchedulerSettings(executor=("127.0.0.1:9",)))  # where nothing listens


async def test_a_bug_in_the_loop_ends_the_service_and_all_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = service()
    scheduler.core.executor_ready(Capacity(10, 16, 64, 10, 10, 100), 0.0)
    stream = scheduler.streams.admit(
        check_request(ids(1, 2), MODEL, DRAFTING),
        [1, 2],
        CALLER,
        arrival=0.0,
        deadline=None,
        served=Served(MODEL, None),
    )

    def bug(now: float) -> list[object]:
        raise AssertionError("a bug")

    monkeypatch.setattr(scheduler.core, "expire", bug)
    with pytest.raises(ExceptionGroup):
        await scheduler.run(shown)
    with raises(ErrorReason.INTERNAL):
        await stream.take()
    assert scheduler.state is ServiceState.DRAINING


async def test_a_task_of_the_service_that_returns_is_a_failure() -> None:
    with pytest.raises(RuntimeError, match="has ended"):
        await _endless(asyncio.sleep(0))


async def test_a_cancellation_from_inside_is_a_failure_and_one_from_outside_is_not() -> None:
    async def stray() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="has ended"):
        await asyncio.create_task(_endless(stray()))
    task = asyncio.create_task(_endless(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_without_an_executor_requests_are_refused_and_administrators_see_its_address() -> None:
    with raises(ErrorReason.NOT_READY, match=r"127\.0\.0\.1:9: not reached yet"):
        service().served_for_request(Identity("ours", "token", admin=True))
