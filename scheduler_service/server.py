"""The scheduler's process: its gRPC server from start to shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2
from paceline.channel import MAX_CONNECTION_STREAMS, Link, server_options
from paceline.extras import installation
from paceline.scheduler.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.gate import Gate
from service_kit.lifecycle import EXIT_PORT, StartError, live
from service_kit.logs import Log
from service_kit.probes import PublishedHealth
from service_kit.process import Shutdown, write_port_file
from service_kit.settings import EXIT_USAGE

from scheduler_service.config import SchedulerSettings
from scheduler_service.rpc.admin_servicer import AdminServicer
from scheduler_service.rpc.interceptor import StatusInterceptor
from scheduler_service.rpc.servicer import SchedulerServicer
from scheduler_service.service import SchedulerService

if TYPE_CHECKING:
    from scheduler_service.gateway.server import GatewayPort

log = Log(__name__)

SERVICE = "paceline.scheduler.v1.SchedulerService"
ADMIN_SERVICE = "paceline.scheduler.v1.AdminService"

RECEIVE_BYTES = 16 << 20
"""Above the 4 MiB of the public contract, so that a prompt of up to this size is refused with its field."""
_PUBLIC_OPTIONS = dict(server_options(Link.PUBLIC)) | {"grpc.max_receive_message_length": RECEIVE_BYTES}
SPARE_STREAMS = 64


def max_streams(settings: SchedulerSettings) -> int:
    """Concurrent calls of one connection: as many as requests can be live, and SPARE_STREAMS to refuse more.

    gRPC hands arriving calls over one by one, 0.1 ms each, in the order of all callers. Calls beyond this
    limit stay in their client, and so delay no other client's calls.
    """
    live = settings.max_running + settings.max_queued_requests
    return min(live + SPARE_STREAMS, MAX_CONNECTION_STREAMS)


class SchedulerServer:
    """A `service_kit.lifecycle.Service`: the gRPC server of a SchedulerService, and the gateway's port."""

    names: tuple[str, ...] = (SERVICE, ADMIN_SERVICE)
    grace_s = 1.0

    def __init__(self, settings: SchedulerSettings) -> None:
        """Raises RuntimeError if the gateway's packages are missing."""
        self.service = SchedulerService(settings)
        self._settings, self.connections = settings, Connections()
        self.metrics, self.health = self.service.metrics, PublishedHealth(SERVICE)
        self.audit = Audit(
            (scheduler_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR),
            self.metrics.call_failed,
        )
        credentials = settings.credentials
        servicer = SchedulerServicer(self.service, credentials)
        options = _PUBLIC_OPTIONS | {"grpc.max_concurrent_streams": max_streams(settings)}
        self.server = grpc.aio.server(
            interceptors=[
                Gate(credentials, self.audit, self.connections),
                StatusInterceptor(credentials, self.audit, servicer.admit),
            ],
            options=list(options.items()),
        )
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, self.server)
        admin = AdminServicer(self.service, credentials, self.audit)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self.server)
        self._gateway: GatewayPort | None = None
        if settings.gateway_port is not None:
            self._gateway = _gateway_port(self.service, servicer, settings, self.connections, _PUBLIC_OPTIONS)

    async def open(self) -> dict[str, object]:
        """Open the gateway's port, if there is one. Raises RuntimeError, OSError."""
        settings, said = self._settings, {"executors": ",".join(self._settings.executor)}
        if self._gateway is None:
            return {**said}
        port = await self._gateway.start()
        if settings.gateway_port_file is not None:
            write_port_file(settings.gateway_port_file, port)
        return {**said, "gateway_host": settings.gateway_host, "gateway_port": port}

    async def run(self, shutdown: Shutdown) -> None:
        """Serve until cancelled; ask for the shutdown if the draft executors can't be used. A bug raises."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.service.run(self.health.show))
            await self.service.drafts.misconfigured.wait()
            shutdown.drain.set()

    async def drain(self, shutdown: Shutdown) -> None:
        """Refuse new requests, and wait until the live ones have ended; a second signal ends them."""
        await self.health.show(serving=False)
        await self.service.drain(self._settings.drain_timeout_s, shutdown.force)

    async def close(self) -> None:
        """Close the gateway's port, and the sessions on all executors."""
        if self._gateway is not None:
            await self._gateway.stop(self.grace_s)
        await self.service.close_sessions()


def _gateway_port(
    service: SchedulerService,
    servicer: SchedulerServicer,
    settings: SchedulerSettings,
    connections: Connections,
    options: Mapping[str, int | str],
) -> GatewayPort:
    """The gateway's port, whose packages are imported here alone. Raises RuntimeError if they are missing."""
    try:
        from scheduler_service.gateway.server import GatewayPort
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "smg_grpc_proto":
            raise
        raise RuntimeError(f"--gateway-port needs further packages; {installation('openai')}") from error
    return GatewayPort(service, servicer, settings, connections, options)


async def serve(settings: SchedulerSettings) -> int:
    """Run a scheduler until a signal, or the end of its parent, stops it. Returns the exit status."""
    made: list[SchedulerServer] = []

    def make() -> SchedulerServer:
        made.append(SchedulerServer(settings))
        return made[0]

    try:
        await live(make, settings)
    except StartError as error:
        log.error(f"can't start: {error}")
        return EXIT_PORT
    except BaseExceptionGroup as error:
        log.error("the scheduler failed", error)
        return 1
    if mistake := made[0].service.drafts.mistake:
        log.error(mistake)  # as the log's last line
        return EXIT_USAGE
    return 0
