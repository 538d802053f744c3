"""Calls without a valid token are refused before a byte of their message is read."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from paceline.channel import Link, server_options
from paceline.executor.v1 import executor_pb2, executor_pb2_grpc
from paceline.scheduler.v1 import admin_pb2, scheduler_pb2
from service_kit import gate
from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.credentials import Credentials
from service_kit.gate import Gate
from service_kit.identity import Identity
from service_kit.token_file import Entry

from tests.support.counting_proxy import CountingProxy, counting_proxy
from tests.support.untyped import raw

ALICE = Identity("alice", "token")
GUARDED = Credentials([Entry.of("sesame", ALICE)], demanded=True)
OPEN = Credentials()
SESAME = (("authorization", "Bearer sesame"),)
NO_AUDIT = Audit((), lambda method, reason: None)
BAD = [(), (("authorization", "Bearer wrong"),), (("authorization", "sesame"),)]
LARGE = bytes(48 << 20)
NOT_READ = 24 << 20  # what sockets and windows of a connection hold is far below
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

OURS = [
    f"/{service.full_name}/{method.name}"
    for module in (executor_pb2, scheduler_pb2, admin_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
CLOSED = [*OURS, f"{HEALTH}List", REFLECTION, "/no.such.Service/Method", f"{OURS[0]}Not", "/"]


@dataclass(frozen=True)
class Details:
    """grpc.HandlerCallDetails as data."""

    method: str
    invocation_metadata: Any


class Context:
    """Remembers how a call was ended."""

    code: grpc.StatusCode | None = None

    def peer(self) -> str:
        return "ipv4:10.0.0.9:1234"

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.code = status.code
        raise grpc.aio.AbortError


class Untouchable:
    """A request stream that must not be read."""

    def __aiter__(self) -> Any:
        raise AssertionError("the request was read")


@pytest.mark.parametrize("metadata", BAD)
async def test_every_method_is_refused_by_a_handler_that_reads_nothing(metadata: Any) -> None:
    async def continuation(_details: object) -> None:
        raise AssertionError("the handler was looked up")

    for method in CLOSED:
        details: Any = Details(method, metadata)
        handler: Any = await Gate(GUARDED, NO_AUDIT).intercept_service(continuation, details)
        assert (handler.request_streaming, handler.response_streaming) == (True, True), method
        context = Context()
        with pytest.raises(grpc.aio.AbortError):
            await handler.stream_stream(Untouchable(), context)
        assert context.code is grpc.StatusCode.UNAUTHENTICATED, method


@asynccontextmanager
async def serving(
    credentials: Credentials, audit: Audit | None = None, connections: Connections | None = None
) -> AsyncIterator[CountingProxy]:
    """A server with health, reflection and the executor's methods, which answer nothing, behind a proxy."""
    first = Gate(credentials, audit or NO_AUDIT, connections)
    server = grpc.aio.server(interceptors=[first], options=server_options(Link.PRIVATE))
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(
        executor_pb2_grpc.ExecutorServiceServicer(), server
    )
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection([reflection.SERVICE_NAME], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with counting_proxy(port) as proxy:
            yield proxy
    finally:
        await server.stop(None)


@asynccontextmanager
async def channel(proxy: CountingProxy) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{proxy.port}", [("grpc.max_send_message_length", -1)]
    ) as opened:
        yield opened


async def code_of(call: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = await call.code()
    return code


@pytest.mark.parametrize(
    "method", ["/paceline.executor.v1.ExecutorService/Prefill", f"{HEALTH}List", "/no.such.Service/Method"]
)
async def test_a_message_without_a_valid_token_stays_in_the_clients_memory(method: str) -> None:
    async with serving(GUARDED) as proxy, channel(proxy) as opened:
        call = raw(opened).unary_unary(method)(LARGE, metadata=BAD[1])
        assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED
        stream = raw(opened).stream_stream(REFLECTION)(iter([LARGE]), metadata=BAD[1])
        assert await code_of(stream) is grpc.StatusCode.UNAUTHENTICATED
        assert proxy.sent < NOT_READ


async def test_a_call_without_a_valid_token_is_counted_and_logged_by_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: list[tuple[str, str]] = []
    audit = Audit((executor_pb2.DESCRIPTOR,), lambda method, reason: counted.append((method, reason)))

    async def continuation(_details: object) -> None:
        raise AssertionError("the handler was looked up")

    for method in ("/paceline.executor.v1.ExecutorService/Prefill", "/no.such.Service/Method"):
        details: Any = Details(method, BAD[1])
        handler: Any = await Gate(GUARDED, audit).intercept_service(continuation, details)
        with pytest.raises(grpc.aio.AbortError):
            await handler.stream_stream(Untouchable(), Context())
    assert counted == [("Prefill", "UNAUTHENTICATED"), ("other", "UNAUTHENTICATED")]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.records[0].fields == {  # type: ignore[attr-defined]
        "identity": "10.0.0.9",
        "method": "Prefill",
        "code": "UNAUTHENTICATED",
        "reason": "UNAUTHENTICATED",
        "count": 1,
    }
    async with serving(OPEN, audit) as proxy, channel(proxy) as opened:
        await code_of(raw(opened).unary_unary("/no.such.Service/Method")(b""))
    assert counted[2:] == [("other", "UNSUPPORTED")]


async def test_a_call_of_an_unknown_method_is_not_read() -> None:
    async with serving(OPEN) as proxy, channel(proxy) as opened:
        call = raw(opened).unary_unary("/no.such.Service/Method")(LARGE)
        assert await code_of(call) is grpc.StatusCode.UNIMPLEMENTED
        assert proxy.sent < NOT_READ


async def test_callers_without_a_token_get_the_servers_health_whatever_they_send() -> None:
    async with serving(GUARDED) as proxy, channel(proxy) as opened:
        answer = await raw(opened).unary_unary(f"{HEALTH}Check")(LARGE)
        assert health_pb2.HealthCheckResponse.FromString(answer).status == 1
        watch = raw(opened).unary_stream(f"{HEALTH}Watch")(b"not a message")
        assert health_pb2.HealthCheckResponse.FromString(await watch.read()).status == 1
        watch.cancel()
        assert proxy.sent < NOT_READ


async def test_callers_with_a_token_ask_for_a_services_health_by_name() -> None:
    async with serving(GUARDED) as proxy, channel(proxy) as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="no such"), metadata=SESAME)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_watches_without_a_token_are_bounded_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "MAX_UNKNOWN_WATCHES", 2)
    async with serving(GUARDED) as proxy, channel(proxy) as opened:
        watch = health_pb2_grpc.HealthStub(opened).Watch
        request = health_pb2.HealthCheckRequest()
        open_watches = [watch(request) for _ in range(2)]
        for one in open_watches:
            await one.read()
        assert await code_of(watch(request)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        known = watch(request, metadata=SESAME)
        assert (await known.read()).status == 1
        open_watches.pop().cancel()
        while (again := await watch(request).read()) is grpc.aio.EOF:  # noqa: ASYNC110  # the server's news
            await asyncio.sleep(0)  # the server has not heard of it yet
        assert again.status == 1
        for one in (*open_watches, known):
            one.cancel()


@pytest.mark.parametrize("shape", ["Check", "Watch", "List", "reflection"])
async def test_malformed_messages_are_refused_without_an_exceptions_text(shape: str) -> None:
    async with serving(OPEN) as proxy, channel(proxy) as opened:
        if shape == "reflection":
            call: Any = raw(opened).stream_stream(REFLECTION)(iter([b"\xff\xff"]))
        elif shape == "Watch":
            call = raw(opened).unary_stream(f"{HEALTH}{shape}")(b"\xff\xff")
        else:
            call = raw(opened).unary_unary(f"{HEALTH}{shape}")(b"\xff\xff")
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "request: its bytes are not a message of this RPC's type"


@pytest.mark.parametrize("method", ["Check", "Watch", "reflection"])
async def test_whose_call_it_is_is_known_before_its_message_has_come(method: str) -> None:
    connections = Connections()
    async with serving(GUARDED, connections=connections) as proxy, channel(proxy) as opened:
        path = REFLECTION if method == "reflection" else f"{HEALTH}{method}"
        call: Any = raw(opened).stream_stream(path)(metadata=SESAME)
        while not connections._admitted:  # noqa: ASYNC110  # what the server learns
            await asyncio.sleep(0)
        call.cancel()


async def test_the_metadata_of_ended_calls_is_freed_though_no_collection_is_due() -> None:
    def kept() -> int:
        return sum(type(one) is tuple and one[:1] == ("x-kept",) for one in gc.get_objects())

    long, calls = "v" * (7 << 10), 1 + 2 * gate.UNCOLLECTED_BYTES // (7 << 10)
    gc.disable()
    try:
        async with serving(GUARDED) as proxy, channel(proxy) as opened:
            for _ in range(calls):
                call = raw(opened).unary_unary("/no.such.Service/Method")(b"", metadata=[("x-kept", long)])
                assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED
            assert kept() < 0.7 * calls
    finally:
        gc.enable()
