"""WatchSteps: steps from a number or a time on, without others' names, and nobody waits for a slow reader."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.identity import Identity

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import Failure
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step_log import COLUMNS, FAILURES, Events, StepEvent, StepPart
from scheduler_service.errors import ErrorReason
from scheduler_service.rpc import step_calls
from scheduler_service.rpc.codec.steps import step_log
from scheduler_service.rpc.step_calls import StepCalls
from scheduler_service.streams.request import scoped_id
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request
from tests.unit.scheduler_shell.bad_ends import raises

MINE, THEIRS = Identity("mine", "token"), Identity("theirs", "token")
ADMIN = Identity("boss", "token", admin=True)


class Reader:
    """A call: what it is sent, and who makes it. `gate`: a message is taken only while it is set."""

    def __init__(self, caller: Identity) -> None:
        self.caller, self.messages, self.gate = caller, list[pb.StepLog](), asyncio.Event()
        self.gate.set()

    async def write(self, message: pb.WatchStepsResponse) -> None:
        await self.gate.wait()
        self.messages.append(message.log)


class Callers:
    """Credentials that know each reader's identity."""

    def identify(self, reader: Reader) -> Identity:
        return reader.caller


def served() -> tuple[Harness, StepCalls]:
    """Two identities' requests were computed."""
    harness = Harness(FakeExecutor(CAPACITY), CoreConfig())
    harness.now = time.monotonic()
    for who in (MINE, THEIRS):
        harness.add(make_request(scoped_id(who.name, "r"), identity=who.name, arrival=harness.now))
    harness.run()
    return harness, calls_of(harness.core)


def calls_of(core: StepScheduler) -> StepCalls:
    return StepCalls(core.log, Callers())  # type: ignore[arg-type]


async def watched(calls: StepCalls, caller: Identity, **request: int) -> list[pb.StepLog]:
    reader: Any = Reader(caller)
    await calls.watch(pb.WatchStepsRequest(**request), reader)
    messages: list[pb.StepLog] = reader.messages
    return messages


def test_a_failed_request_has_the_code_with_which_its_call_ends() -> None:
    codes = {
        Failure.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
        Failure.CANCELLED: grpc.StatusCode.ABORTED,
        Failure.NO_EXECUTOR: grpc.StatusCode.UNAVAILABLE,
        Failure.POISON: grpc.StatusCode.INTERNAL,
        Failure.NOT_FINITE: grpc.StatusCode.INTERNAL,
        Failure.REFUSED: grpc.StatusCode.INTERNAL,
        Failure.GRAMMAR: grpc.StatusCode.INVALID_ARGUMENT,
    }
    events = Events()
    events.add(StepEvent.ENDED, 1, 0, 1)
    for failure in codes:
        events.add(StepEvent.REFUSED, 1, 0, FAILURES.index(failure))
    log = step_log(StepPart(1, 0.0, ([0],) * len(COLUMNS), events, {}), 0, ADMIN, 0.0).log
    assert list(log.event_values) == [1, *(code.value[0] for code in codes.values())]


async def test_the_columns_of_a_message_have_an_entry_a_step() -> None:
    harness, calls = served()
    [log] = await watched(calls, MINE, max_steps=3)
    assert (log.first_step, log.lost_steps) == (1, 0)
    for name in COLUMNS:
        assert len(getattr(log, name)) == 3, name
    assert list(log.started_us) == pytest.approx([0, 10_000, 10_000], abs=1)
    assert log.started_at_us / 1e6 == pytest.approx(time.time(), abs=60)
    assert log.event_kinds[:2] == [pb.STEP_EVENT_KIND_QUEUED] * 2
    assert len(harness.core.log) > 3


async def test_others_requests_are_numbers_without_names_but_for_administrators() -> None:
    _, calls = served()
    [mine] = await watched(calls, MINE, max_steps=3)
    assert {one.request_id for one in mine.names} == {"r"}
    assert [one.identity for one in mine.names] == [""]
    assert set(mine.event_requests) == {1, 2}
    assert b"theirs" not in mine.SerializeToString()
    [everybodys] = await watched(calls, ADMIN, max_steps=3)
    assert {one.identity for one in everybodys.names} == {"mine", "theirs"}


async def test_a_reader_goes_on_where_it_was_and_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_calls, "LOOK_S", 0.0)
    harness, calls = served()
    end = harness.core.log.end
    reader: Any = Reader(MINE)
    task = asyncio.create_task(calls.watch(pb.WatchStepsRequest(first_step=end, max_steps=1), reader))
    await asyncio.sleep(0)
    assert reader.messages == []
    harness.add(make_request("later"))
    harness.run()
    await task
    assert [log.first_step for log in reader.messages] == [end]


async def test_a_slow_reader_finds_how_many_steps_it_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_calls, "LOOK_S", 0.0)
    monkeypatch.setattr("scheduler_service.core.step_log.MAX_BYTES", 0)
    monkeypatch.setattr("scheduler_service.core.step_log.BLOCK_STEPS", 4)
    harness, calls = served()
    reader: Any = Reader(MINE)
    task = asyncio.create_task(calls.watch(pb.WatchStepsRequest(first_step=1, max_steps=99), reader))
    reader.gate.clear()
    await asyncio.sleep(0)
    harness.add(make_request("long", max_tokens=50))
    harness.run()
    reader.gate.set()
    for _ in range(50):
        await asyncio.sleep(0)
    task.cancel()
    received = sum(len(log.tokens) for log in reader.messages)
    lost = sum(log.lost_steps for log in reader.messages)
    assert lost > 0
    assert received + lost == harness.core.log.end - 1


async def test_wrong_bounds_are_refused_and_readers_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, calls = served()
    with raises(ErrorReason.INVALID_REQUEST):
        await watched(calls, MINE, first_step=1, last_us=1)
    with raises(ErrorReason.INVALID_REQUEST):
        await watched(calls, MINE, first_step=harness.core.log.end + 1)
    [recent] = await watched(calls, MINE, last_us=3_600_000_000, max_steps=2)
    assert recent.first_step == 1
    monkeypatch.setattr(step_calls, "MAX_READERS_PER_IDENTITY", 1)
    reader: Any = Reader(MINE)
    task = asyncio.create_task(calls.watch(pb.WatchStepsRequest(), reader))
    await asyncio.sleep(0)
    with raises(ErrorReason.WATCHERS):
        await watched(calls, MINE, max_steps=1)
    assert await watched(calls, THEIRS, max_steps=1)
    monkeypatch.setattr(step_calls, "MAX_READERS", 1)
    with raises(ErrorReason.WATCHERS):
        await watched(calls, THEIRS, max_steps=1)
    assert await watched(calls, ADMIN, max_steps=1), "others lock no administrator out"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await watched(calls, MINE, max_steps=1), "one that has left counts no more"
