"""`ExecutorServer`: the gRPC server of one executor process."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2
from paceline.channel import Link, server_options
from paceline.executor.v1 import executor_pb2
from paceline.executor.v1 import executor_pb2_grpc as rpc
from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.gate import Gate
from service_kit.logs import Log
from service_kit.probes import PublishedHealth
from service_kit.process import Shutdown

from executor_service.config import ExecutorConfig
from executor_service.rpc.errors import ErrorInterceptor
from executor_service.rpc.metrics import Metrics
from executor_service.rpc.servicer import ExecutorServicer
from executor_service.runtime.runtime import Runtime, RuntimeState

if TYPE_CHECKING:  # they import OpenTelemetry
    from service_kit.otlp import SpanSender

    from executor_service.rpc.spans import StepSpans

log = Log(__name__)

SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name
_LEASE_TICK_S = 0.25
_HEALTH_TICK_S = 1.0


class ExecutorServer:
    """A `service_kit.lifecycle.Service`: loads the model while it already answers GetStatus."""

    names: tuple[str, ...] = (SERVICE,)
    grace_s = 2.0  # after the last step was computed

    def __init__(self, config: ExecutorConfig) -> None:
        """Raises ModelError."""
        self._config = config
        self._runtime = runtime = Runtime.from_config(config)
        self.metrics, self.health = Metrics(runtime), PublishedHealth(SERVICE)
        self.audit = Audit((executor_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR), self.metrics.call_failed)
        self.connections, credentials = Connections(), config.credentials
        self.server = grpc.aio.server(
            interceptors=[
                Gate(credentials, self.audit, self.connections),
                ErrorInterceptor(credentials, self.audit),
            ],
            options=server_options(Link.PRIVATE),
        )
        self._sender: SpanSender | None = None
        spans: StepSpans | None = None
        if config.otel:
            self._sender, spans = _spans()
            self.metrics.registry.register(self._sender)
        servicer = ExecutorServicer(runtime, self.metrics, credentials, self.audit, spans)
        rpc.add_ExecutorServiceServicer_to_server(servicer, self.server)

    async def open(self) -> dict[str, object]:
        """No further ports."""
        return {"backend": self._config.backend}

    async def run(self, shutdown: Shutdown) -> None:  # noqa: ARG002  # nothing here asks for the end
        """Load the model, and serve until cancelled. Raises ModelError."""
        endless = _show_health(self._runtime, self.health), _tick_leases(self._runtime)
        background = [asyncio.create_task(loop) for loop in endless]
        try:
            await self._runtime.load()
            await asyncio.gather(*background)
        finally:
            for task in background:
                task.cancel()

    async def drain(self, shutdown: Shutdown) -> None:
        """Open no more sequences, and wait until those that are open are released."""
        self._forced = asyncio.create_task(_exit_on_second_signal(shutdown))  # until the process ends
        timeout_s = self._config.drain_timeout_s
        log.info("draining", sequences=self._runtime.sequences, timeout_s=timeout_s)
        self._runtime.drain()
        await self.health.show(serving=False)
        live = await self._runtime.drained(timeout_s)
        log.info("drained", abandoned_sequences=live)

    async def close(self) -> None:
        """End the device thread."""
        self._runtime.close()
        if self._sender is not None:
            await asyncio.to_thread(self._sender.close)


def _spans() -> tuple[SpanSender, StepSpans]:
    """What records spans. Imports OpenTelemetry."""
    from service_kit.otlp import SpanSender

    from executor_service.rpc.spans import StepSpans

    sender = SpanSender("paceline-executor")
    return sender, StepSpans(sender.provider)


async def _exit_on_second_signal(shutdown: Shutdown) -> None:
    """End the process without draining when a second signal arrives."""
    await shutdown.force.wait()
    log.warning("second signal: ending at once")
    os._exit(128 + shutdown.signal)


async def _tick_leases(runtime: Runtime) -> None:
    """Advance the lease clock during long steps too.

    The clock counts the time between two readings up to a bound, so that a stopped process loses no leases.
    """
    while True:
        if (loaded := runtime.loaded_or_none) is not None:
            loaded.engine.store.clock()
        await asyncio.sleep(_LEASE_TICK_S)


async def _show_health(runtime: Runtime, health: PublishedHealth) -> None:
    """Copy the runtime's state to `health` when it changes, and again and again for a stuck step.

    SERVING means that a step sent now would be computed. Endless. Logs a step that is stuck, once.
    """
    period_s = min(_HEALTH_TICK_S, runtime.config.stuck_after_s / 5)
    was_stuck = False
    while True:
        runtime.changed.clear()
        stuck = runtime.stuck
        if stuck and not was_stuck:
            log.error("a step is stuck", seconds=round(runtime.worker.busy_s, 1))
        was_stuck = stuck
        await health.show(runtime.state is RuntimeState.SERVING and not stuck)
        with suppress(TimeoutError):
            async with asyncio.timeout(period_s):
                await runtime.changed.wait()
