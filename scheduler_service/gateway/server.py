"""The gateway's port: a gRPC server of its own beside the public API's."""

from __future__ import annotations

from collections.abc import Mapping

import grpc.aio
from paceline.channel import is_loopback, max_connections
from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.gate import Gate
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from scheduler_service.config import SchedulerSettings
from scheduler_service.gateway.callers import GatewayCallers
from scheduler_service.gateway.servicer import WorkerServicer
from scheduler_service.rpc.interceptor import StatusInterceptor
from scheduler_service.rpc.servicer import SchedulerServicer
from scheduler_service.service import SchedulerService

SERVICE_PREFIX = "/vllm.grpc.engine."
_OPTIONS = {
    # Never: clients of the public port are sent away from time to time to find further schedulers, and a
    # gateway would have to send again what it was just sending.
    "grpc.max_connection_age_ms": (1 << 31) - 1,
}


class GatewayPort:
    """Serves the worker protocol from `start` to `stop`, in plaintext: the gateway can't do otherwise."""

    def __init__(
        self,
        service: SchedulerService,
        door: SchedulerServicer,
        settings: SchedulerSettings,
        connections: Connections,
        options: Mapping[str, int | str],
    ) -> None:
        """`options`: of the gRPC server."""
        self._address, self._connections = settings.gateway_address, connections
        own_user_only = settings.callers_need_credentials and is_loopback(self._address)
        self._callers = GatewayCallers(own_user_only=own_user_only)
        servicer = WorkerServicer(service, door, self._callers, settings.gateway_model_name)
        audit = Audit((vllm_engine_pb2.DESCRIPTOR,), service.metrics.call_failed)
        statuses = StatusInterceptor(self._callers, audit, servicer.admit, prefix=SERVICE_PREFIX)
        given = {**options, **_OPTIONS}
        gate = Gate(self._callers, audit, connections)
        self._server = grpc.aio.server(interceptors=[gate, statuses], options=list(given.items()))
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, self._server)

    async def start(self) -> int:
        """Listen; returns the port. Raises RuntimeError if it is in use."""
        self._callers.port = self._server.add_insecure_port(self._address)
        self._connections.watch(self._callers.port, max_connections())
        await self._server.start()
        return self._callers.port

    async def stop(self, grace_s: float) -> None:
        """Stop; calls have `grace_s` seconds to send their last messages."""
        await self._server.stop(grace_s)
