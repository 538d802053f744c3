"""grpc.health.v1: SERVING means that a step sent now would be computed."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from paceline.executor.v1 import executor_pb2 as pb
from paceline.service.logs import Log

from executor_service.runtime.runtime import Runtime, RuntimeState

log = Log(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
_PERIOD_S = 0.1


class Health:
    """Copies the runtime's state to the health servicer."""

    def __init__(self, runtime: Runtime) -> None:
        self.servicer = HealthServicer()
        self._runtime = runtime
        self._serving: bool | None = None

    async def watch(self) -> None:
        """Update again and again, until cancelled."""
        while True:
            await self.update()
            await asyncio.sleep(_PERIOD_S)

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
