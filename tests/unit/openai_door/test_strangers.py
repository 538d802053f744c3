"""A gateway beyond loopback ends when its scheduler begins to take calls without a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline import Security
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc
from paceline_openai import __main__ as gateway

from tests.support.ports import kept_port


class Scheduler(rpc.SchedulerServiceServicer, health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers strangers, or refuses them; its health can be watched by all."""

    def __init__(self, *, closed: bool) -> None:
        self._closed, self.times, self.asked = closed, 0, asyncio.Event()

    async def GetModelInfo(  # noqa: N802
        self, request: object, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        self.times += 1
        self.asked.set()
        if self._closed:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return pb.GetModelInfoResponse(name="model")

    async def Watch(  # noqa: N802
        self, request: object, context: object
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        await asyncio.Event().wait()


async def started(port: int, servicer: Scheduler) -> grpc.aio.Server:
    server = grpc.aio.server()
    rpc.add_SchedulerServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server


async def test_a_scheduler_that_comes_back_without_tokens_ends_the_gateway() -> None:
    port = kept_port()
    staying = asyncio.create_task(gateway._stay_closed(f"127.0.0.1:{port}", Security()))
    for _ in range(2):
        scheduler = Scheduler(closed=True)
        server = await started(port, scheduler)
        await scheduler.asked.wait()
        assert scheduler.times == 1  # each refusal is a line of its log
        await server.stop(None)
    server = await started(port, Scheduler(closed=False))
    with pytest.raises(gateway.NotSafe):
        await staying
    await server.stop(None)
