"""The scheduler's process: its gRPC server from start to shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection
from paceline.channel import MAX_CONNECTION_STREAMS, Link, server_options
from paceline.extras import installation
from paceline.scheduler.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from service_kit.audit import Audit
from service_kit.gate import Gate
from service_kit.logs import Log
from service_kit.probes import HealthPort
from service_kit.process import Shutdown, bind_local, write_port_file
from service_kit.settings import EXIT_USAGE

from scheduler_service.config import SchedulerSettings
from scheduler_service.rpc.admin_servicer import AdminServicer
from scheduler_service.rpc.health import SERVICE, PublishedHealth
from scheduler_service.rpc.interceptor import StatusInterceptor
from scheduler_service.rpc.servicer import SchedulerServicer
from scheduler_service.service import SchedulerService

if TYPE_CHECKING:
    from scheduler_service.gateway.server import GatewayPort

log = Log(__name__)

ADMIN_SERVICE = "paceline.scheduler.v1.AdminService"

RECEIVE_BYTES = 16 << 20
"""Above the 4 MiB of the public contract, so that a prompt of up to this size is refused with its field."""
_PUBLIC_OPTIONS = dict(server_options(Link.PUBLIC)) | {"grpc.max_receive_message_length": RECEIVE_BYTES}
SPARE_STREAMS = 64
GRACE_S = 1.0
"""Seconds that calls have to send their last messages when the server stops."""


def max_streams(settings: SchedulerSettings) -> int:
    """Concurrent calls of one connection: as many as requests can be live, and SPARE_STREAMS to refuse more.

    gRPC hands arriving calls over one by one, 0.1 ms each, in the order of all callers. Calls beyond this
    limit stay in their client, and so delay no other client's calls.
    """
    live = settings.max_running + settings.max_queued_requests
    return min(live + SPARE_STREAMS, MAX_CONNECTION_STREAMS)


class Server:
    """The gRPC server of a SchedulerService. Call `start`, then `serve`."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.service = SchedulerService(settings)
        self._settings = settings
        audit = Audit(
            (scheduler_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR),
            self.service.metrics.call_failed,
        )
        servicer = SchedulerServicer(self.service, settings.credentials)
        options = _PUBLIC_OPTIONS | {"grpc.max_concurrent_streams": max_streams(settings)}
        self._server = grpc.aio.server(
            interceptors=[
                Gate(settings.credentials, audit),
                StatusInterceptor(settings.credentials, audit, servicer.admit),
            ],
            options=list(options.items()),
        )
        self._health = PublishedHealth(self._server)
        self._health_port = HealthPort(self._health.servicer, audit) if settings.health_address else None
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self.service, settings.credentials, audit), self._server
        )
        if settings.reflection:
            names = (SERVICE, ADMIN_SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self._gateway: GatewayPort | None = None
        if settings.gateway_port is not None:
            self._gateway = _gateway_port(self.service, servicer, settings, _PUBLIC_OPTIONS)

    async def start(self) -> int:
        """Listen, on the other ports too; returns the gRPC port. Raises RuntimeError, OSError."""
        settings = self._settings
        port = settings.server_security.bind(self._server, settings.address)
        if settings.local_socket is not None:
            bind_local(self._server, settings.local_socket)
        await self._health.show(serving=False)
        await self._server.start()
        if self._health_port is not None and settings.health_address is not None:
            await self._health_port.open(settings.health_address)
        if settings.metrics_port is not None:
            metrics_port = self.service.metrics.serve(settings.metrics_host, settings.metrics_port)
            log.info("metrics", host=settings.metrics_host, port=metrics_port)
        if self._gateway is not None:
            gateway_port = await self._gateway.start()
            log.info("gateway's port", host=settings.gateway_host, port=gateway_port)
            if settings.gateway_port_file is not None:
                write_port_file(settings.gateway_port_file, gateway_port)
        if settings.port_file is not None:
            write_port_file(settings.port_file, port)
        log.info("listening", host=settings.host, port=port, executors=",".join(settings.executor))
        for warning in settings.security_warnings():
            log.warning(warning)
        return port

    async def serve(self, shutdown: Shutdown) -> int:
        """Serve until a shutdown is asked for, then drain and stop. Returns the process's exit status."""
        running = asyncio.create_task(self.service.run(self._health.show), name="service")
        watching = asyncio.create_task(self._settings.credentials.watch(), name="tokens file")
        asked = asyncio.create_task(shutdown.drain.wait())
        misconfigured = asyncio.create_task(self.service.drafts.misconfigured.wait())
        await asyncio.wait((running, asked, misconfigured), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await self._health.show(serving=False)
            await self.service.drain(self._settings.drain_timeout_s, shutdown.force)
        watching.cancel()
        asked.cancel()
        misconfigured.cancel()
        servers = [self._server.stop(GRACE_S)]
        if self._gateway is not None:
            servers.append(self._gateway.stop(GRACE_S))
        await asyncio.gather(*servers)
        if self._health_port is not None:
            await self._health_port.close()
        await self.service.close_sessions()
        running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            log.info("stopped")
            if self.service.drafts.mistake:
                log.error(self.service.drafts.mistake)  # as the log's last line
                return EXIT_USAGE
            return 0
        except BaseExceptionGroup as error:
            log.error("the scheduler failed", error)
        return 1


def _gateway_port(
    service: SchedulerService,
    servicer: SchedulerServicer,
    settings: SchedulerSettings,
    options: Mapping[str, int | str],
) -> GatewayPort:
    """The gateway's port, whose packages are imported here alone. Raises RuntimeError if they are missing."""
    try:
        from scheduler_service.gateway.server import GatewayPort
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "smg_grpc_proto":
            raise
        raise RuntimeError(f"--gateway-port needs further packages; {installation('openai')}") from error
    return GatewayPort(service, servicer, settings, options)


async def main(settings: SchedulerSettings) -> int:
    """Run a scheduler until a signal, or the end of its parent, stops it. Returns the exit status."""
    shutdown = Shutdown()
    shutdown.listen()
    if settings.bound_to_stdin:
        shutdown.listen_to_parent()
    try:
        server = Server(settings)
        await server.start()
    except (OSError, RuntimeError) as error:
        log.error(f"can't start: {error}")
        return 1
    return await server.serve(shutdown)
