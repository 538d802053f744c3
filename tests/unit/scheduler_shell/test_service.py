"""A scheduler ends when one of its tasks fails, instead of continuing without it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Literal

import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from prometheus_client import generate_latest
from service_kit.identity import Identity

from scheduler_service.config import SchedulerSettings
from scheduler_service.core.dispatcher import Dispatcher
from scheduler_service.core.step import Capacity
from scheduler_service.core.waiting.reasons import WaitReason
from scheduler_service.errors import ErrorReason
from scheduler_service.link.pool import Served
from scheduler_service.model import ServiceState
from scheduler_service.rpc.codec.requests import check_request
from scheduler_service.rpc.codec.responses import service_status
from scheduler_service.service import SchedulerService, _endless
from tests.unit.scheduler.harness import make_request
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


@pytest.mark.parametrize("health", ["serving", "not-serving"])
def test_a_planner_that_admits_nothing_makes_the_service_degraded_and_health_as_configured(
    health: Literal["serving", "not-serving"], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = SchedulerService(SchedulerSettings(executor=("127.0.0.1:9",), degraded_health=health))
    core = scheduler.core
    core.executor_ready(Capacity(10, 16, 64, 10, 10, 100), 0.0)
    scheduler.pool.served = Served(MODEL, None)
    monkeypatch.setattr(SchedulerService, "ready_executors", 1)
    ready = SimpleNamespace(ready=True, step_age_s=0.0)
    monkeypatch.setattr(scheduler.pool, "active", ready)

    def admit_nothing(self: Dispatcher, now: float) -> None:
        self._pool.waits.block(self._pool.queue.first_sequence(), WaitReason.SEATS)

    monkeypatch.setattr(Dispatcher, "next_step", admit_nothing)
    core.add(make_request("secret"), 0.0)
    core.plan(1.0)
    assert (scheduler.state, scheduler.healthy) == (ServiceState.SERVING, True)
    core.plan(32.0)
    scheduler._tell_fault()
    assert (scheduler.state, scheduler.healthy) == (ServiceState.DEGRADED, health == "serving")
    assert b"paceline_scheduler_degraded 1.0" in generate_latest(scheduler.metrics.registry)
    told = service_status(
        state=scheduler.state,
        uptime_s=1.0,
        ready_executors=1,
        snapshot=core.snapshot(),
        rates=scheduler.rates,
        fault=core.fault,
    )
    assert (told.state, told.degraded) == (pb.SCHEDULER_STATE_DEGRADED, pb.WAIT_REASON_SEATS)
    assert told.degraded_detail == "0 of 10 places are taken"
    monkeypatch.undo()
    core.plan(33.0)
    scheduler._tell_fault()
    assert core.fault is None
    assert b"paceline_scheduler_degraded 0.0" in generate_latest(scheduler.metrics.registry)


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
