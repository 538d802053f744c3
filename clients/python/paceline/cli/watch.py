"""A running service under watch: asked again and again whether it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio

from paceline.channel import Link, open_aio_channel
from paceline.cli.activity import activity
from paceline.cli.pulse import Pulse
from paceline.service.clock import RunningClock

_TICK_S = 0.25
_ASK_EVERY_S = 0.5
_RETRY_S = 0.2  # after a probe that could not be delivered
_PROBE_TIMEOUT_S = 3.0
_SILENT = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
)

Heard = Callable[[bool], None]
"""Called with each answer of a service: whether it serves."""

Watch = Callable[[int, Heard], Awaitable[str]]
"""Watches the process of this id; returns when it is frozen, with the reason."""


def watch_socket(socket: Path) -> Watch:
    """Watches a service through its Unix socket, by health checks."""

    async def watch(pid: int, heard: Heard) -> str:
        from grpc_health.v1 import health_pb2, health_pb2_grpc  # comes with the services

        serving = health_pb2.HealthCheckResponse.SERVING
        async with open_aio_channel(f"unix:{socket}", Link.PRIVATE) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def probe() -> bool:
                try:
                    reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    return error.code() not in _SILENT
                heard(getattr(reply, "status", None) == serving)  # None: it could not be parsed
                return True

            return await _until_frozen(pid, probe)

    return watch


async def _until_frozen(pid: int, probe: Callable[[], Awaitable[bool]]) -> str:
    clock = RunningClock(time.monotonic, cap_s=2 * _TICK_S)
    pulse = Pulse(clock())

    async def ask() -> None:
        while True:
            if await probe():
                pulse.answered(clock())
                await asyncio.sleep(_ASK_EVERY_S)
            else:
                pulse.missed()
                await asyncio.sleep(_RETRY_S)

    async with asyncio.TaskGroup() as group:
        asking = group.create_task(ask())
        while True:
            await asyncio.sleep(_TICK_S)
            if reason := pulse.look(clock(), activity(pid)):
                asking.cancel()
                return reason
