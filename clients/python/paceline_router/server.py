"""The router's process: its settings, and its gRPC server from start to shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import grpc.aio
from grpc_health.v1 import health_pb2
from paceline.channel import Link, is_loopback, server_options
from paceline.scheduler.v1 import admin_pb2, scheduler_pb2
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.gate import Gate
from service_kit.identity import MAX_PRIORITY, Identity
from service_kit.probes import PublishedHealth
from service_kit.process import Shutdown
from service_kit.scrapes import ScrapePort
from service_kit.settings import ServiceSettings

from paceline_router.answers import RouterAnswers
from paceline_router.calls import RoutedCalls
from paceline_router.live_calls import MAX_CALLS, LiveCalls
from paceline_router.models import ModelState, RoutedModels
from paceline_router.supervisor_connection import SupervisorConnection

SERVICE = "paceline.scheduler.v1.SchedulerService"
ADMIN_SERVICE = "paceline.scheduler.v1.AdminService"
RECEIVE_BYTES = 16 << 20
"""As the scheduler takes, which names the field of a request that is too large."""
SPARE_STREAMS = 64
"""Calls of one connection beyond those of one model, to be refused with a reason."""
_POLL_S = 0.05


class RouterSettings(ServiceSettings):
    """Paceline's router: one address for several models."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_ROUTER_")

    SECRET_TOKENS: ClassVar[Mapping[str, Identity]] = {
        "client_token": Identity("client", "token", 1.0, MAX_PRIORITY),
    }

    port: int = Field(default=50051, ge=0, le=65535, description="port to listen on; 0: any free one")
    supervisor: Path = Field(description="Unix socket of the process that keeps the models running")

    def check_secrets(self) -> None:
        """As `ServiceSettings`. Raises ValueError too where strangers would be administrators.

        The schedulers see a local caller in each that has no token, and a local one is an administrator.
        """
        super().check_secrets()
        if not self.credentials.demanded and not is_loopback(self.address):
            raise ValueError(f"--host: {self.host} is not loopback: several models need tokens there")
        if self.tls_client_ca is not None:
            raise ValueError("--tls-client-ca: the models' schedulers see no certificates: give tokens")


class RouterMetrics(Collector):
    """What is scraped: calls by model, and failed ones."""

    def __init__(self) -> None:
        self.live = LiveCalls()
        self._failed: dict[tuple[str, str], int] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def call_failed(self, method: str, reason: str) -> None:
        """Count a call that was refused here."""
        self._failed[method, reason] = self._failed.get((method, reason), 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        live = GaugeMetricFamily("paceline_router_live_calls", "Calls under way", labels=["model"])
        for model, calls in self.live.by_model().items():
            live.add_metric([model], calls)
        failed = CounterMetricFamily(
            "paceline_router_refused_calls", "Calls refused before a model", labels=["method", "reason"]
        )
        for labels, count in list(self._failed.items()):
            failed.add_metric(list(labels), count)
        yield from (live, failed)

    def serve(self, host: str, port: int) -> int:
        """Serve over HTTP; returns the port. Raises OSError."""
        return ScrapePort(make_wsgi_app(self._registry)).open(host, port)


class RouterServer:
    """A `service_kit.lifecycle.Service`: the gRPC server of a router."""

    names: tuple[str, ...] = (SERVICE, ADMIN_SERVICE)
    grace_s = 1.0

    def __init__(self, settings: RouterSettings) -> None:
        self._settings, self.connections = settings, Connections()
        self.metrics, self.health = RouterMetrics(), PublishedHealth(SERVICE)
        contracts = scheduler_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR
        self.audit = Audit(contracts, self.metrics.call_failed)
        self._supervisor = SupervisorConnection(settings.supervisor, self._told)
        answers = RouterAnswers(self._supervisor, settings.credentials, self.audit)
        self._calls = answers.calls = RoutedCalls(
            self._supervisor, settings.credentials, answers.methods, answers.refused
        )
        self.metrics.live = self._calls.live
        options = dict(server_options(Link.PUBLIC)) | {
            "grpc.max_receive_message_length": RECEIVE_BYTES,
            "grpc.max_concurrent_streams": 2 * MAX_CALLS + SPARE_STREAMS,
        }
        self.server = grpc.aio.server(
            interceptors=[Gate(settings.credentials, self.audit, self.connections)],
            options=list(options.items()),
        )
        self.server.add_generic_rpc_handlers((self._calls,))

    async def open(self) -> dict[str, object]:
        """Nothing more to open."""
        return {}

    async def run(self, shutdown: Shutdown) -> None:  # noqa: ARG002  # of the Service
        """Serve until cancelled."""
        await self._supervisor.run()

    async def drain(self, shutdown: Shutdown) -> None:
        """Refuse new calls of models, and wait until the live ones have ended; a second signal ends them."""
        self._supervisor.close()
        await self.health.show(serving=False)
        deadline = asyncio.get_running_loop().time() + self._settings.drain_timeout_s
        while self._calls.live.by_model() and not shutdown.force.is_set():
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Close the connections to schedulers."""
        await self._calls.close()

    async def _told(self, models: RoutedModels) -> None:
        """Let health checks pass while any model serves."""
        self._calls.keep({one.socket for one in models})
        serving = any(one.state is ModelState.SERVING for one in models)
        await self.health.show(serving=serving and not self._supervisor.closing)
