"""The scheduler's process: its gRPC server from start to shutdown."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2
from paceline.channel import MAX_CONNECTION_STREAMS, Link, server_options
from paceline.scheduler.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.gate import Gate
from service_kit.lifecycle import EXIT_PORT, StartError, live
from service_kit.logs import Log
from service_kit.probes import PublishedHealth
from service_kit.process import Shutdown
from service_kit.settings import EXIT_USAGE

from scheduler_service.config import SchedulerSettings
from scheduler_service.rpc.admin_servicer import AdminServicer
from scheduler_service.rpc.interceptor import StatusInterceptor
from scheduler_service.rpc.load_wait import LoadWait
from scheduler_service.rpc.servicer import SchedulerServicer
from scheduler_service.service import SchedulerService

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
    """A `service_kit.lifecycle.Service`: the gRPC server of a SchedulerService."""

    names: tuple[str, ...] = (SERVICE, ADMIN_SERVICE)
    grace_s = 1.0

    def __init__(self, settings: SchedulerSettings) -> None:
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
                StatusInterceptor(
                    credentials,
                    self.audit,
                    servicer.admit,
                    load_wait=LoadWait(self.service.settled),
                    tracer=self.service.spans,
                ),
            ],
            options=list(options.items()),
        )
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, self.server)
        admin = AdminServicer(self.service, credentials, self.audit)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self.server)

    async def open(self) -> dict[str, object]:
        """Nothing more to open; returns what the log says of it."""
        return {"executors": ",".join(self._settings.executor)}

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
        """Close the sessions on all executors."""
        await self.service.close_sessions()


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
