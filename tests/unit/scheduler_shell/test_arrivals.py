"""Callers take turns in starting calls, and the message of a refused call is not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from paceline.channel import MAX_CONNECTION_STREAMS
from service_kit.audit import Audit
from service_kit.credentials import Credentials

from scheduler_service.config import SchedulerSettings
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.rpc.arrivals import (
    AT_ONCE,
    CONTESTED_REFUSALS_PER_S,
    MAX_REFUSED_CALLERS,
    MAX_TURNS,
    REFUSALS_AT_ONCE,
    REFUSALS_PER_S,
    ArrivalQueue,
    RefusalPace,
)
from scheduler_service.rpc.interceptor import StatusInterceptor
from scheduler_service.server import SPARE_STREAMS, max_streams
from tests.support.untyped import raw

NO_AUDIT = Audit((), lambda method, reason: None)


class Calls:
    """Calls of an ArrivalQueue, and the order in which they begin."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._queue = ArrivalQueue()
        self._tasks: list[asyncio.Task[None]] = []

    def arrive(self, *callers: str) -> None:
        self._tasks += [asyncio.create_task(self._call(caller)) for caller in callers]

    async def _call(self, caller: str) -> None:
        await self._queue.turn(caller)
        self.begun.append(caller)

    async def end(self) -> None:
        await asyncio.gather(*self._tasks)

    def cancel(self, number: int) -> None:
        self._tasks[number].cancel()


async def test_a_call_beside_thousands_of_another_caller_begins_as_soon_as_it_has_arrived() -> None:
    calls = Calls()
    calls.arrive(*["flood"] * 2000, "polite")
    await asyncio.sleep(0)
    assert "polite" not in calls.begun[:AT_ONCE]
    assert calls.begun == ["flood"] * AT_ONCE + ["polite"]
    await calls.end()
    assert len(calls.begun) == 2001


async def test_waiting_calls_begin_in_turns_of_their_callers() -> None:
    calls = Calls()
    calls.arrive(*["a"] * 12, *["b"] * 12, *["c"] * 6)
    await calls.end()
    rest = calls.begun[3 * AT_ONCE :]
    assert rest == ["a", "b", "c"] * 2 + ["a", "b"] * 6


async def test_calls_begin_although_others_keep_arriving() -> None:
    calls = Calls()
    calls.arrive(*["flood"] * 10)
    for _ in range(3 * MAX_TURNS):
        calls.arrive("flood")
        await asyncio.sleep(0)
    assert len(calls.begun) >= 3 * AT_ONCE
    await calls.end()


async def test_a_cancelled_call_takes_no_turn() -> None:
    calls = Calls()
    calls.arrive(*["a"] * 10)
    await asyncio.sleep(0)
    for number in range(AT_ONCE, 9):
        calls.cancel(number)
    with pytest.raises(asyncio.CancelledError):
        await calls.end()
    await asyncio.wait_for(calls._tasks[9], 60)
    assert len(calls.begun) == AT_ONCE + 1


@pytest.mark.parametrize(
    ("contested", "rate"),
    [(False, REFUSALS_PER_S), (True, CONTESTED_REFUSALS_PER_S)],
    ids=["alone", "beside others"],
)
def test_refusals_are_paced_for_each_caller_apart(contested: bool, rate: float) -> None:
    now = 100.0
    pace = RefusalPace(lambda: now)
    assert not any(pace.delay_s("flood", contested=contested) for _ in range(REFUSALS_AT_ONCE))
    delays = [pace.delay_s("flood", contested=contested) for _ in range(100)]
    assert delays == pytest.approx([i / rate for i in range(100)])
    assert pace.delay_s("polite", contested=contested) == 0.0
    now += 100.0
    assert pace.delay_s("flood", contested=contested) == 0.0


def test_the_pace_of_callers_without_recent_refusals_is_forgotten() -> None:
    now = 0.0
    pace = RefusalPace(lambda: now)
    for number in range(10 * MAX_REFUSED_CALLERS):
        now += 1.0
        pace.delay_s(str(number), contested=False)
    assert len(pace._due) <= MAX_REFUSED_CALLERS


def test_calls_of_one_connection_beyond_what_can_be_live_wait_at_their_client() -> None:
    settings = SchedulerSettings(max_running=8, max_queued_requests=100)
    assert max_streams(settings) == 108 + SPARE_STREAMS
    assert max_streams(SchedulerSettings(max_queued_requests=1 << 20)) == MAX_CONNECTION_STREAMS


class CountingServer:
    """Refuses calls while it is full; counts the messages that were read."""

    def __init__(self) -> None:
        self.full, self.read = False, 0

    async def admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self.full:
            raise ServiceError(ErrorReason.QUEUE_FULL, "full", retry_after_s=2.0)

    def parse(self, data: bytes) -> bytes:
        self.read += 1
        return data


async def echo(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return request


async def echo_twice(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.write(request)
    await context.write(request)


@pytest.fixture
async def counting_server() -> AsyncIterator[tuple[CountingServer, grpc.aio.Channel]]:
    counting_server = CountingServer()
    server = grpc.aio.server(interceptors=[StatusInterceptor(Credentials(), NO_AUDIT, counting_server.admit)])
    handlers: dict[str, Any] = {
        "GenerateUnary": grpc.unary_unary_rpc_method_handler(echo, counting_server.parse),
        "Generate": grpc.unary_stream_rpc_method_handler(echo_twice, counting_server.parse),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("paceline.test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield counting_server, channel
    await server.stop(None)


async def test_a_refused_calls_message_is_not_read(
    counting_server: tuple[CountingServer, grpc.aio.Channel],
) -> None:
    counts, channel = counting_server[0], raw(counting_server[1])
    unary = channel.unary_unary("/paceline.test/GenerateUnary")
    stream = channel.unary_stream("/paceline.test/Generate")
    assert await unary(b"x") == b"x"
    assert [message async for message in stream(b"y")] == [b"y", b"y"]
    assert counts.read == 2
    counts.full = True
    for call in (unary(b"x"), stream(b"x").read()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert counts.read == 2


async def test_a_call_without_a_message_is_invalid(
    counting_server: tuple[CountingServer, grpc.aio.Channel],
) -> None:
    call = raw(counting_server[1]).stream_stream("/paceline.test/Generate")()
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
