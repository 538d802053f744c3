"""startup → serve → shutdown of one executor process."""

from __future__ import annotations

import asyncio
import hmac
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from paceline.channel import Link, server_options
from paceline.executor.v1 import executor_pb2_grpc as rpc

from executor_service.config import ExecutorConfig
from executor_service.errors import ErrorInterceptor, Handler
from executor_service.health import SERVICE, Health
from executor_service.logs import get_logger
from executor_service.metrics import Metrics
from executor_service.runtime import Runtime
from executor_service.servicer import ExecutorServicer

log = get_logger(__name__)

EXIT_PORT = os.EX_UNAVAILABLE  # 69: the address can't be bound
_GRACE_S = 2.0  # for replies on their way when nothing is left to compute
_LEASE_TICK_S = 0.25


class StartError(Exception):
    """The process can't serve; the message is for the operator."""


async def run(config: ExecutorConfig) -> None:
    """Serve until a signal says stop. Raises StartError and ModelError."""
    if config.port_file is not None:
        config.port_file.unlink(missing_ok=True)  # of an earlier life
    runtime = Runtime.from_config(config)
    metrics, health = Metrics(runtime), Health(runtime)
    stop = _stop_on_signals()

    server = _make_server(config, runtime, metrics, health)
    port = await _bind(server, config)
    metrics_port = _serve_metrics(metrics, config)
    await health.update()
    await server.start()  # GetStatus and health answer from here on
    _announce(config, port, metrics_port)

    chores = [asyncio.create_task(health.watch()), asyncio.create_task(_tick_leases(runtime))]
    loading = asyncio.create_task(runtime.load())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        loading.result()
        await stopping

    log.info("draining", extra={"sequences": runtime.sequences, "timeout_s": config.drain_timeout_s})
    runtime.drain()
    await health.update()
    live = await runtime.drained(config.drain_timeout_s)
    await server.stop(_GRACE_S)
    for chore in chores:
        chore.cancel()
    runtime.close()
    log.info("stopped", extra={"abandoned_sequences": live})


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def received(number: int) -> None:
        if stop.is_set():
            log.warning("second signal: ending at once")
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
    return stop


def _make_server(
    config: ExecutorConfig, runtime: Runtime, metrics: Metrics, health: Health
) -> grpc.aio.Server:
    interceptors: list[Any] = [ErrorInterceptor()]
    if config.auth_token_file is not None:
        interceptors.insert(0, TokenInterceptor(_read(config.auth_token_file).decode().strip()))
    server = grpc.aio.server(interceptors=interceptors, options=server_options(Link.PRIVATE))
    rpc.add_ExecutorServiceServicer_to_server(ExecutorServicer(runtime, metrics), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if config.reflection:
        names = (SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return server


async def _bind(server: grpc.aio.Server, config: ExecutorConfig) -> int:
    try:
        if config.tls_cert is None or config.tls_key is None:
            return server.add_insecure_port(config.address)
        client_ca = None if config.tls_client_ca is None else _read(config.tls_client_ca)
        credentials = grpc.ssl_server_credentials(
            [(_read(config.tls_key), _read(config.tls_cert))],
            root_certificates=client_ca,
            require_client_auth=client_ca is not None,
        )
        return server.add_secure_port(config.address, credentials)
    except RuntimeError as error:
        raise StartError(f"can't bind {config.address}: is the port taken? ({error})") from error


def _serve_metrics(metrics: Metrics, config: ExecutorConfig) -> int | None:
    if config.metrics_port is None:
        return None
    try:
        return metrics.serve(config.metrics_host, config.metrics_port)
    except OSError as error:
        raise StartError(f"can't bind the metrics port {config.metrics_port}: {error}") from error


def _announce(config: ExecutorConfig, port: int, metrics_port: int | None) -> None:
    """Log the bound port, and write it to --port-file in one piece."""
    log.info(
        "listening",
        extra={
            "host": config.host,
            "port": port,
            "metrics_port": metrics_port,
            "backend": config.backend,
            "tls": config.tls_cert is not None,
        },
    )
    if config.port_file is not None:
        part = config.port_file.with_name(config.port_file.name + ".part")
        part.write_text(f"{port}\n")
        part.replace(config.port_file)


async def _tick_leases(runtime: Runtime) -> None:
    """Keep the lease clock going through long steps: it counts only what it sees pass."""
    while True:
        if (loaded := runtime.loaded_or_none) is not None:
            loaded.engine.clock()
        await asyncio.sleep(_LEASE_TICK_S)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(f"can't read {path}: {error.strerror}") from error


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without `authorization: Bearer <token>`; health checks need none."""

    def __init__(self, token: str) -> None:
        if not token:
            raise StartError("the token file is empty")
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Let a call with the token through."""
        metadata: dict[str, Any] = dict(details.invocation_metadata or ())
        given = metadata.get("authorization", "")
        given = given if isinstance(given, bytes) else str(given).encode()
        if details.method.startswith("/grpc.health.v1.Health/") or hmac.compare_digest(given, self._expected):
            return await continuation(details)
        handler = await continuation(details)
        # A streaming call is refused as one: a unary handler would wait for its first message.
        if handler is not None and handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(_refuse_token)
        return grpc.unary_unary_rpc_method_handler(_refuse_token)


async def _refuse_token(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "authorization: Bearer token missing or wrong")
