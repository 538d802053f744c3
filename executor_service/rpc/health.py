"""grpc.health.v1: SERVING means that a step sent now would be computed."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from paceline.executor.v1 import executor_pb2 as pb
from service_kit.logs import Log

from executor_service.runtime.runtime import Runtime, RuntimeState

log = Log(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
_MAX_PERIOD_S = 1.0


class Health:
    """Copies the runtime's state to the health servicer."""

    def __init__(self, runtime: Runtime) -> None:
        self.servicer = HealthServicer()
        self._runtime = runtime
        self._serving: bool | None = None

    async def watch(self) -> None:
        """Update when the state changes, and again and again for a stuck step, until cancelled."""
        period_s = min(_MAX_PERIOD_S, self._runtime.config.stuck_after_s / 5)
        while True:
            self._runtime.changed.clear()
            await self.update()
            with suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self._runtime.changed.wait()

    async def update(self) -> None:
        """Publish the status if it has changed. Logs a step that is stuck."""
        stuck = self._runtime.stuck
        serving = self._runtime.state is RuntimeState.SERVING and not stuck
        if serving == self._serving:
            return
        if stuck:
            log.error("a step is stuck", seconds=round(self._runtime.worker.busy_s, 1))
        self._serving = serving
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", SERVICE):
            await self.servicer.set(service, status)
