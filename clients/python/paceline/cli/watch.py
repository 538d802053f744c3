"""Detects a frozen service process by repeated health checks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

import grpc
import grpc.aio
from service_kit.clock import RunningClock

from paceline.channel import Link, open_aio_channel
from paceline.cli.activity import activity
from paceline.cli.freeze_detector import Activity, FreezeDetector
from paceline.cli.gateway_probe import probe_status

_TICK_S = 0.25
_PROBE_INTERVAL_S = 1.0
_RETRY_S = 0.2  # after an unanswered probe
_PROBE_TIMEOUT_S = 3.0
_LOOK_S, _STOPPED_LOOKS = 0.1, 3
_UNANSWERED = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
)

OnServing = Callable[[], None]
"""Called after every health check that the service answers with SERVING."""

Watch = Callable[[int, OnServing], Awaitable[str]]
"""watch(pid, on_serving) waits until the process is frozen, and returns the reason. Cancel it to end it."""


def watch_socket(socket: Path) -> Watch:
    """A Watch that sends health checks to the service's Unix socket.

    Any answer but those in _UNANSWERED counts, errors too: it proves that the event loop runs. The rules for
    processes that do not answer, still starting ones among them, are FreezeDetector's.
    """

    async def watch_process(pid: int, on_serving: OnServing) -> str:
        from grpc_health.v1 import health_pb2, health_pb2_grpc  # installed with the services only

        serving = health_pb2.HealthCheckResponse.SERVING
        async with open_aio_channel(f"unix:{socket}", Link.PRIVATE) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def probe() -> bool:
                try:
                    reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    return error.code() not in _UNANSWERED
                if getattr(reply, "status", None) == serving:  # reply is None if it can't be parsed
                    on_serving()
                return True

            return await _until_frozen(pid, probe)

    return watch_process


def watch_gateway(socket: Path) -> Watch:
    """A Watch that asks a gateway's process over its Unix socket. Any answer counts."""

    async def watch_process(pid: int, on_serving: OnServing) -> str:
        async def probe() -> bool:
            status = await probe_status(socket, "/liveness")
            if status == HTTPStatus.OK:
                on_serving()
            return status is not None

        return await _until_frozen(pid, probe)

    return watch_process


def or_stopped(watch: Watch) -> Watch:
    """A Watch for a process whose place another one takes at once: SIGSTOP freezes it in 0.2 s."""

    async def watch_process(pid: int, on_serving: OnServing) -> str:
        waits = [
            asyncio.ensure_future(watch(pid, on_serving)),
            asyncio.ensure_future(_until_stopped(pid)),
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()

    return watch_process


async def _until_stopped(pid: int) -> str:
    """Wait until a process was stopped by a signal in _STOPPED_LOOKS looks in a row; the reason."""
    looks = 0
    while looks < _STOPPED_LOOKS:
        await asyncio.sleep(_LOOK_S)
        looks = looks + 1 if activity(pid) is Activity.STOPPED else 0
    return "stopped by a signal"


async def _until_frozen(pid: int, probe: Callable[[], Awaitable[bool]]) -> str:
    """Probe until the process is frozen; returns the reason. `probe` returns whether it was answered.

    The activity of the process is read only while an answer is missing. The clock leaves out time in which
    this process was itself stopped, and at most 0.75 s more after an answer.
    """
    clock = RunningClock(time.monotonic, cap_s=2 * _TICK_S)
    detector = FreezeDetector(clock())
    while True:
        probing = asyncio.ensure_future(probe())
        try:
            while not (await asyncio.wait({probing}, timeout=_TICK_S))[0]:
                if reason := detector.freeze_reason(clock(), activity(pid)):
                    return reason
        finally:
            probing.cancel()
        if probing.result():
            detector.answered(clock())
            await asyncio.sleep(_PROBE_INTERVAL_S)
            continue
        detector.missed()
        if reason := detector.freeze_reason(clock(), activity(pid)):
            return reason
        await asyncio.sleep(_RETRY_S)
