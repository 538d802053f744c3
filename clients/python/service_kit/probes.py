"""The published health, and the health port: health checks alone, in plaintext and without a token.

Orchestrators' own gRPC probes speak neither TLS nor tokens. The port tells what the service's own port tells
every caller too, and whether the process is alive.
"""

from __future__ import annotations

from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from paceline.channel import Link, server_options

from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.credentials import Credentials
from service_kit.gate import Gate
from service_kit.logs import Log

log = Log(__name__)

LIVENESS = "liveness"
"""A name that health checks may ask for: SERVING whenever the event loop answers, so also while the service
loads, drains or has no executor. The other names tell whether new requests are taken."""

MAX_CONNECTIONS = 64

_BOUNDS = {
    "grpc.max_receive_message_length": 1024,
    "grpc.max_allowed_incoming_connections": MAX_CONNECTIONS,
    "grpc.max_concurrent_streams": 16,  # of a connection
}
"""Everybody who reaches the port is answered, so little is enough to answer probes."""


class PublishedHealth:
    """The health status of the whole server ("") and of its service, by grpc.health.v1."""

    def __init__(self, service: str) -> None:
        self.servicer = HealthServicer()
        self._service = service
        self._serving: bool | None = None

    async def show(self, serving: bool) -> None:  # noqa: FBT001  # its one argument is what its name says
        """Set the status, and tell it to watchers if it has changed."""
        if serving is self._serving:
            return
        self._serving = serving
        status = health_pb2.HealthCheckResponse
        for name in ("", self._service):
            await self.servicer.set(name, status.SERVING if serving else status.NOT_SERVING)


class HealthPort:
    """A gRPC server with health checks alone. `servicer` answers them, here and on the service's own port."""

    def __init__(self, servicer: Any, audit: Audit, connections: Connections) -> None:
        self._servicer, self._connections = servicer, connections
        options = dict(server_options(Link.PUBLIC)) | _BOUNDS
        self._server = grpc.aio.server(
            interceptors=[Gate(Credentials(), audit, connections)], options=list(options.items())
        )
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)

    async def open(self, address: str) -> int:
        """Listen; returns the port. Raises RuntimeError if it is taken."""
        port = self._server.add_insecure_port(address)
        self._connections.watch(port, MAX_CONNECTIONS, small=True)
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        log.info("health checks", address=address, port=port)
        return port

    async def close(self) -> None:
        """Stop answering."""
        await self._server.stop(None)
