"""The gateway's process: `paceline serve --openai` and `paceline gateway` start it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from paceline import Security, errors
from paceline.aio import Client
from paceline.channel import Link, is_loopback, open_aio_channel
from paceline.directory import DirectoryUse
from service_kit import logs
from service_kit.process import Shutdown, limit_collections, new_event_loop, write_port_file

from paceline_openai.app import Gateway
from paceline_openai.beginnings import EXTRA_STREAMS
from paceline_openai.server import Server
from paceline_openai.settings import Settings, settings

log = logs.Log(__name__)

_USAGE = 2
_PROBE_TIMEOUT_S = 5.0
_PROBE_WAIT_S = 0.5
_PROBED_AGAIN_S, _PROBED_UNWATCHED_S = 600.0, 10.0
_GARBAGE = 50_000


class NotSafe(Exception):
    """Strangers would get in."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped; returns the exit status."""
    try:
        given = settings(arguments)
    except ValueError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return _USAGE
    logs.configure(given.log_format, given.log_level)  # type: ignore[arg-type]
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner, _spans(on=given.otel) as tell_losses:
            runner.run(_run(given, tell_losses))
    except (NotSafe, ImportError, ValueError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return _USAGE
    except OSError as error:
        where = error.filename or f"{given.host}:{given.port}"
        print(f"gateway: {where}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _spans(*, on: bool) -> Iterator[Callable[[Callable[[int], object]], object]]:
    """A context manager: within the block the SDK's calls have spans, which are sent. Imports OpenTelemetry.

    Gives what is called with a function that takes the number of lost spans, whenever some are.

    Their parents are what HTTP requests say in `traceparent`. Raises ImportError without OpenTelemetry.
    """
    if not on:
        yield lambda _: None  # there are no losses
        return
    from paceline.tracing import trace_calls
    from service_kit.otlp import SpanSender

    sender = SpanSender("paceline-gateway")
    trace_calls(sender.provider)
    try:
        yield sender.tell_losses
    finally:
        sender.close()


async def _run(given: Settings, tell_losses: Callable[[Callable[[int], object]], object]) -> None:
    shutdown = Shutdown()
    shutdown.listen()
    if given.until_stdin_ends:
        shutdown.listen_to_parent()
    local = is_loopback(f"{given.host}:0")
    if not local and given.tls_cert is None and not given.insecure:
        raise NotSafe(f"--host: {given.host} is not loopback: give --tls-cert and --tls-key, or --insecure")
    security = Security(given.scheduler_ca, given.scheduler_cert, given.scheduler_key)
    # Only given schedulers are asked whether they refuse strangers: beyond loopback no others are used.
    directory: DirectoryUse = "safe" if local else "off"
    async with Client(
        given.scheduler, security=security, directory=directory, extra_streams=EXTRA_STREAMS
    ) as client:
        app = Gateway(
            client, given.bounds, model_name=given.model_name, origins=given.cors_origin, local=local
        )
        tell_losses(app.metrics.lost_spans.inc)
        server = Server(app, given.bounds, given.tls_cert, given.tls_key)
        watching: set[asyncio.Task[None]] = set()
        if not local:
            await _until_closed(given.scheduler, security, shutdown.drain)
            watching |= {asyncio.create_task(_stay_closed(one, security)) for one in given.scheduler}
        if given.local_socket is not None:
            await server.listen_locally(given.local_socket)
        port = await server.listen(given.host, given.port)
        limit_collections(_GARBAGE)
        if given.port_file is not None:
            write_port_file(given.port_file, port)
        log.info("serving", host=given.host, port=port)
        draining = asyncio.create_task(shutdown.drain.wait())
        await asyncio.wait({draining, *watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in watching:
            if task.done():
                task.result()
            task.cancel()
        await server.stop(shutdown.force)


async def _until_closed(schedulers: Sequence[str], security: Security, stop: asyncio.Event) -> None:
    """Wait until a scheduler answers, and refuses a call without a token. Raises NotSafe if one does not."""
    while not stop.is_set():
        found = [await _refuses_strangers(one, security) for one in schedulers]
        if True in found:
            return
        log.warning("no scheduler answers yet, so nothing is served", schedulers=", ".join(schedulers))
        with suppress(TimeoutError):
            async with asyncio.timeout(_PROBE_WAIT_S):
                await stop.wait()


async def _stay_closed(scheduler: str, security: Security) -> None:
    """Ask again when it has started, when its health has changed, and now and then: its log has each refusal.

    Raises NotSafe when it takes calls without a token.
    """
    async with open_aio_channel(scheduler, Link.PUBLIC, security) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            wait_s = _PROBE_WAIT_S
            try:
                async with asyncio.timeout(_PROBED_AGAIN_S):
                    async for _ in health.Watch(health_pb2.HealthCheckRequest()):
                        while await _refuses_strangers(scheduler, security) is None:  # noqa: ASYNC110
                            await asyncio.sleep(_PROBE_WAIT_S)
            except TimeoutError:
                pass
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:  # it can't be watched
                    await _refuses_strangers(scheduler, security)
                    wait_s = _PROBED_UNWATCHED_S
            await asyncio.sleep(wait_s)


async def _refuses_strangers(scheduler: str, security: Security) -> bool | None:
    """Whether it does; None: it does not answer. Raises NotSafe if it answers a call without a token."""
    async with Client(scheduler, security=security, directory="off") as client:
        try:
            await client.model_info(timeout_s=_PROBE_TIMEOUT_S)
        except errors.Unauthenticated:
            return True
        except (errors.RetryLater, errors.DeadlineExceeded) as error:
            if not error_is_a_schedulers(error):
                return None
    raise NotSafe(
        f"the scheduler at {scheduler} answers callers without a token, so everybody who reaches this port"
        " would be served: give it tokens (--token-file, or -S tokens-file=FILE), or listen on loopback"
    )


def error_is_a_schedulers(error: errors.PacelineError) -> bool:
    """Whether a scheduler itself has answered so, and has thus let the caller in."""
    return bool(error.reason)


if __name__ == "__main__":
    sys.exit(main())
