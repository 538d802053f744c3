"""The published health, and the health port: health checks alone, in plaintext and without a token.

Orchestrators' own gRPC probes speak neither TLS nor tokens. The port tells what the service's own port tells
every caller too, and whether the process is alive.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from paceline.channel import Link, server_options

from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.credentials import Credentials
from service_kit.gate import Gate
from service_kit.logs import Log
from service_kit.status import end_call, rich_status

log = Log(__name__)

LIVENESS = "liveness"
"""A name that health checks may ask for: SERVING whenever the event loop answers, so also while the service
loads, drains or has no executor. The other names tell whether new requests are taken."""

MAX_CONNECTIONS = 64
MAX_WATCHES = 32
"""Open watches of all callers. What they leave of the connections is for probes."""
HANDSHAKE_S = 1.0
"""For a new connection to begin to speak HTTP/2."""

_BOUNDS = {
    "grpc.max_receive_message_length": 1024,
    # More than stay: gRPC refuses newcomers, `Connections` closes what is longest without a request.
    "grpc.max_allowed_incoming_connections": 4 * MAX_CONNECTIONS,
    "grpc.server_handshake_timeout_ms": int(HANDSHAKE_S * 1000),
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


class HealthPort(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """A gRPC server with health checks alone. `servicer` answers them, here and on the service's own port."""

    def __init__(self, servicer: Any, audit: Audit, connections: Connections) -> None:
        self._servicer, self._connections, self._watches = servicer, connections, 0
        options = dict(server_options(Link.PUBLIC)) | _BOUNDS
        self._server = grpc.aio.server(
            interceptors=[Gate(Credentials(), audit, connections)], options=list(options.items())
        )
        health_pb2_grpc.add_HealthServicer_to_server(self, self._server)

    async def open(self, address: str) -> int:
        """Listen; returns the port. Raises RuntimeError if it is taken."""
        port = self._server.add_insecure_port(address)
        self._connections.watch(port, MAX_CONNECTIONS, small=True)
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        log.info("health checks", address=address, port=port)
        return port

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """As the servicer's."""
        with self._connections.request(context.peer()):
            return await self._servicer.Check(request, context)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """As the servicer's; RESOURCE_EXHAUSTED beyond MAX_WATCHES."""
        if self._watches >= MAX_WATCHES:
            message = f"{MAX_WATCHES} health watches are open at this port"
            ending = end_call(
                context, rich_status(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="QUOTA")
            )
            del context  # see end_call
            await ending
        self._watches += 1
        try:
            with self._connections.request(context.peer()):
                await self._servicer.Watch(request, context)
        finally:
            self._watches -= 1

    async def close(self) -> None:
        """Stop answering."""
        await self._server.stop(None)
