"""The health port answers whoever reaches it, and does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from paceline.channel import Link, open_aio_channel
from paceline.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.probes import LIVENESS, MAX_CONNECTIONS, MAX_WATCHES, HealthPort

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Opened:
    """A health port, and a channel to it."""

    def __init__(self, servicer: Any, port: int, channel: grpc.aio.Channel) -> None:
        self.servicer, self.port, self.channel = servicer, port, channel

    async def check(self, service: str) -> Any:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=60)).status


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    servicer = health.aio.HealthServicer()
    await servicer.set("", NOT_SERVING)
    health_port = HealthPort(servicer, Audit((), lambda method, reason: None), Connections())
    port = await health_port.open("127.0.0.1:0")
    async with open_aio_channel(f"127.0.0.1:{port}", Link.PUBLIC) as channel:
        yield Opened(servicer, port, channel)
    await health_port.close()


async def test_a_process_that_takes_no_requests_is_alive(opened: Opened) -> None:
    assert await opened.check("") == NOT_SERVING
    assert await opened.check(LIVENESS) == SERVING
    await opened.servicer.set("", SERVING)
    assert await opened.check("") == SERVING
    assert await opened.check(LIVENESS) == SERVING


async def test_there_is_nothing_but_health_on_the_health_port(opened: Opened) -> None:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(opened.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetStatus(scheduler_pb2.GetStatusRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await opened.check("no such service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_probe_is_a_small_message(opened: Opened) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await opened.check("x" * 2000)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_health_port_that_is_taken_is_an_error(opened: Opened) -> None:
    second = HealthPort(opened.servicer, Audit((), lambda method, reason: None), Connections())
    with pytest.raises(RuntimeError):
        await second.open(f"127.0.0.1:{opened.port}")


async def test_idle_connections_do_not_keep_probes_out_and_an_open_watch_stays(opened: Opened) -> None:
    request = health_pb2.HealthCheckRequest(service="")
    async with open_aio_channel(f"127.0.0.1:{opened.port}", Link.PUBLIC) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert (await anext(aiter(watch))).status == NOT_SERVING
        idle = [await asyncio.open_connection("127.0.0.1", opened.port) for _ in range(MAX_CONNECTIONS + 20)]
        async with open_aio_channel(f"127.0.0.1:{opened.port}", Link.PUBLIC) as probe:
            stub = health_pb2_grpc.HealthStub(probe)
            assert (await stub.Check(request, timeout=60, wait_for_ready=True)).status == NOT_SERVING
        for reader, writer in idle:  # they do not speak HTTP/2
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
        await opened.servicer.set("", SERVING)
        assert (await anext(aiter(watch))).status == SERVING
        watch.cancel()


async def test_watches_at_the_health_port_are_bounded(opened: Opened) -> None:
    stub = health_pb2_grpc.HealthStub(opened.channel)
    request = health_pb2.HealthCheckRequest(service="")
    async with AsyncExitStack() as channels:
        watches: list[Any] = []
        for _ in range(MAX_WATCHES):
            address = f"127.0.0.1:{opened.port}"
            if len(watches) % 8 == 0:
                channel = await channels.enter_async_context(open_aio_channel(address, Link.PUBLIC))
            watches.append(health_pb2_grpc.HealthStub(channel).Watch(request))
            assert (await anext(aiter(watches[-1]))).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Watch(request)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await opened.check(LIVENESS) == SERVING
        for watch in watches:
            watch.cancel()
