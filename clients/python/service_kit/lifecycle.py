"""The life of a service's process: start, serve, drain, stop. Both services have the same.

The first SIGTERM or SIGINT drains, as the end of standard input does where the parent holds it. What a second
one does is the service's own: the scheduler ends its streams, the executor its process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from paceline.channel import max_connections

from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.logs import Log
from service_kit.probes import HealthPort, PublishedHealth
from service_kit.process import Shutdown, bind_local, write_port_file
from service_kit.settings import ServiceSettings

EXIT_PORT = os.EX_UNAVAILABLE
"""69: an address could not be bound, or a certificate not be read."""

log = Log(__name__)


class StartError(Exception):
    """The service could not start; the message tells the operator why."""


class Metrics(Protocol):
    """What is scraped."""

    def serve(self, host: str, port: int) -> int:
        """Serve over HTTP; returns the port. Raises OSError."""


class Service(Protocol):
    """A service as its process sees it. `server` has its methods and interceptors, and no port yet."""

    server: grpc.aio.Server
    health: PublishedHealth
    audit: Audit
    connections: Connections  # of all its ports
    names: tuple[str, ...]  # of the gRPC services that reflection offers
    grace_s: float  # that calls have to send their last messages when the server stops

    @property
    def metrics(self) -> Metrics:
        """Its metrics."""

    async def open(self) -> dict[str, object]:
        """Open further ports, after the service's own; what the log says of them. Raises RuntimeError."""

    async def run(self, shutdown: Shutdown) -> None:
        """Work until cancelled; may set `shutdown.drain`. Another end, or an exception, ends the service."""

    async def drain(self, shutdown: Shutdown) -> None:
        """Refuse new work and wait for the end of what is live."""

    async def close(self) -> None:
        """Give back what is held outside this process; the ports are closed."""


async def live(make: Callable[[], Service], settings: ServiceSettings) -> None:
    """Make the service and run it until it was asked to drain, and has.

    Raises StartError, and what `make` and `run` raise.
    """
    if settings.port_file is not None:
        settings.port_file.unlink(missing_ok=True)  # left by an earlier process
    shutdown = Shutdown()
    shutdown.listen()
    if settings.bound_to_stdin:
        shutdown.listen_to_parent()
    with _starting(""):
        service = make()
    health_port = await _open(service, settings)

    running = asyncio.create_task(service.run(shutdown), name="service")
    watching = asyncio.create_task(settings.credentials.watch(), name="tokens file")
    asked = asyncio.create_task(shutdown.drain.wait())
    await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        await service.drain(shutdown)
    watching.cancel()
    asked.cancel()
    await service.server.stop(service.grace_s)
    if health_port is not None:
        await health_port.close()
    await service.close()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    log.info("stopped")


async def _open(service: Service, settings: ServiceSettings) -> HealthPort | None:
    """Listen: on the service's port, the health port, the metrics port and its further ports."""
    server, ports = service.server, dict[str, object]()
    health_pb2_grpc.add_HealthServicer_to_server(service.health.servicer, server)
    if settings.reflection:
        names = (*service.names, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    with _starting(f"can't bind {settings.address}: "):
        ports["port"] = port = settings.server_security.bind(server, settings.address)
        service.connections.watch(port, max_connections())
        if settings.local_socket is not None:
            bind_local(server, settings.local_socket)
    await service.health.show(serving=False)
    await server.start()  # health checks are answered while the service gets ready
    health_port = None
    if settings.health_address is not None:
        health_port = HealthPort(service.health.servicer, service.audit, service.connections)
        with _starting(f"can't bind the health port {settings.health_address}: "):
            await health_port.open(settings.health_address)
    if settings.metrics_port is not None:
        with _starting(f"can't bind the metrics port {settings.metrics_port}: "):
            ports["metrics_port"] = service.metrics.serve(settings.metrics_host, settings.metrics_port)
    with _starting(""):
        ports |= await service.open()
        if settings.port_file is not None:
            write_port_file(settings.port_file, port)
    log.info("listening", host=settings.host, tls=settings.tls_cert is not None, **ports)
    for warning in settings.security_warnings():
        log.warning(warning)
    return health_port


@contextmanager
def _starting(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise StartError(f"{what}{error}") from error
