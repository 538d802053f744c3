"""grpc.health.v1: SERVING means that a request sent now would get tokens."""

from __future__ import annotations

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICE = "paceline.scheduler.v1.SchedulerService"


class PublishedHealth:
    """The health status of the whole server ("") and of the service."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.servicer = health.aio.HealthServicer()
        self._serving: bool | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self.servicer, server)

    async def show(self, serving: bool) -> None:  # noqa: FBT001  # its one argument is what its name says
        """Set the status, and tell it to watchers if it has changed."""
        if serving is self._serving:
            return
        self._serving = serving
        status = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self.servicer.set(service, status.SERVING if serving else status.NOT_SERVING)
