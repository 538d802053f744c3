"""The health port answers whoever reaches it, and does nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from paceline.channel import Link, open_aio_channel
from paceline.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.probes import LIVENESS, HealthPort

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
