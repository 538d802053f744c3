"""Startup, serving and shutdown of one executor process."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from paceline.channel import Link, server_options
from paceline.executor.v1 import executor_pb2
from paceline.executor.v1 import executor_pb2_grpc as rpc
from service_kit.audit import Audit
from service_kit.gate import Gate
from service_kit.logs import Log
from service_kit.probes import HealthPort
from service_kit.process import Shutdown, bind_local, write_port_file

from executor_service.config import ExecutorConfig
from executor_service.rpc.errors import ErrorInterceptor
from executor_service.rpc.health import SERVICE, Health
from executor_service.rpc.metrics import Metrics
from executor_service.rpc.servicer import ExecutorServicer
from executor_service.runtime.runtime import Runtime

log = Log(__name__)

EXIT_PORT = os.EX_UNAVAILABLE  # 69: an address could not be bound
_GRACE_S = 2.0  # for sending the last replies, after the last step was computed
_LEASE_TICK_S = 0.25


class ServerStartError(Exception):
    """The server could not start; the message tells the operator why."""


async def run(config: ExecutorConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises ServerStartError and ModelError."""
    if config.port_file is not None:
        config.port_file.unlink(missing_ok=True)  # left by an earlier process
    runtime = Runtime.from_config(config)
    metrics, health = Metrics(runtime), Health(runtime)
    shutdown = Shutdown()
    shutdown.listen()
    if config.bound_to_stdin:
        shutdown.listen_to_parent()

    audit = Audit((executor_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR), metrics.call_failed)
    server = _make_server(config, runtime, metrics, health, audit)
    port = _bind(server, config)
    metrics_port = _serve_metrics(metrics, config)
    await health.update()
    await server.start()  # GetStatus and health checks are answered while the model loads
    health_port = await _open_health_port(config, health, audit)
    _announce(config, port, metrics_port)

    endless = (
        health.watch(),
        _tick_leases(runtime),
        _exit_on_second_signal(shutdown),
        config.credentials.watch(),
    )
    background = [asyncio.create_task(loop) for loop in endless]
    loading = asyncio.create_task(runtime.load())
    stopping = asyncio.create_task(shutdown.drain.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        loading.result()
        await stopping

    log.info("draining", sequences=runtime.sequences, timeout_s=config.drain_timeout_s)
    runtime.drain()
    await health.update()
    live = await runtime.drained(config.drain_timeout_s)
    await server.stop(_GRACE_S)
    if health_port is not None:
        await health_port.close()
    for task in background:
        task.cancel()
    runtime.close()
    log.info("stopped", abandoned_sequences=live)


async def _exit_on_second_signal(shutdown: Shutdown) -> None:
    """End the process without draining when a second signal arrives."""
    await shutdown.force.wait()
    log.warning("second signal: ending at once")
    os._exit(128 + shutdown.signal)


def _make_server(
    config: ExecutorConfig, runtime: Runtime, metrics: Metrics, health: Health, audit: Audit
) -> grpc.aio.Server:
    interceptors: list[Any] = [
        Gate(config.credentials, audit),
        ErrorInterceptor(config.credentials, audit),
    ]
    server = grpc.aio.server(interceptors=interceptors, options=server_options(Link.PRIVATE))
    rpc.add_ExecutorServiceServicer_to_server(
        ExecutorServicer(runtime, metrics, config.credentials, audit), server
    )
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if config.reflection:
        names = (SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return server


def _bind(server: grpc.aio.Server, config: ExecutorConfig) -> int:
    try:
        port = config.server_security.bind(server, config.address)
        if config.local_socket is not None:
            bind_local(server, config.local_socket)
        return port
    except RuntimeError as error:
        raise ServerStartError(f"can't bind {config.address}: is the port taken? ({error})") from error
    except OSError as error:
        raise ServerStartError(f"can't read {error.filename}: {error.strerror}") from error


async def _open_health_port(config: ExecutorConfig, health: Health, audit: Audit) -> HealthPort | None:
    if config.health_address is None:
        return None
    health_port = HealthPort(health.servicer, audit)
    try:
        await health_port.open(config.health_address)
    except RuntimeError as error:
        raise ServerStartError(f"can't bind the health port {config.health_address}: {error}") from error
    return health_port


def _serve_metrics(metrics: Metrics, config: ExecutorConfig) -> int | None:
    if config.metrics_port is None:
        return None
    try:
        return metrics.serve(config.metrics_host, config.metrics_port)
    except OSError as error:
        raise ServerStartError(f"can't bind the metrics port {config.metrics_port}: {error}") from error


def _announce(config: ExecutorConfig, port: int, metrics_port: int | None) -> None:
    log.info(
        "listening",
        host=config.host,
        port=port,
        metrics_port=metrics_port,
        backend=config.backend,
        tls=config.tls_cert is not None,
    )
    for warning in config.security_warnings():
        log.warning(warning)
    if config.port_file is not None:
        write_port_file(config.port_file, port)


async def _tick_leases(runtime: Runtime) -> None:
    """Advance the lease clock during long steps too.

    The clock counts the time between two readings up to a bound, so that a stopped process loses no leases.
    """
    while True:
        if (loaded := runtime.loaded_or_none) is not None:
            loaded.engine.store.clock()
        await asyncio.sleep(_LEASE_TICK_S)
