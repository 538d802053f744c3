"""Every exception of a handler becomes one typed status, never with the text of a bug's exception."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from paceline import errors as sdk
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.audit import Audit
from service_kit.credentials import Credentials

from scheduler_service import errors
from scheduler_service.rpc.interceptor import StatusInterceptor
from tests.support.untyped import raw

NO_AUDIT = Audit((), lambda method, reason: None)
SECRET = "another caller's prompt"


async def raising(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    if request == b"typed":
        raise errors.ServiceError(errors.ErrorReason.QUEUE_FULL, "full", retry_after_s=2.0)
    if request == b"bug":
        raise ValueError(SECRET)
    if request == b"abort":
        await context.abort(grpc.StatusCode.NOT_FOUND, "gone")
    return b"fine"


async def raising_late(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.write(b"first")
    await raising(request, context)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[StatusInterceptor(Credentials(), NO_AUDIT)])
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(raising),
        "Stream": grpc.unary_stream_rpc_method_handler(raising_late),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("paceline.test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def call(channel: grpc.aio.Channel, shape: str, request: bytes) -> sdk.PacelineError:
    if shape == "Unary":
        answer = raw(channel).unary_unary("/paceline.test/Unary")(request)
    else:
        stream = raw(channel).unary_stream("/paceline.test/Stream")(request)
        assert await stream.read() == b"first"
        answer = stream.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return sdk.from_rpc(caught.value)


@pytest.mark.parametrize("shape", ["Unary", "Stream"])
async def test_a_service_error_becomes_a_status_with_its_details(
    channel: grpc.aio.Channel, shape: str
) -> None:
    error = await call(channel, shape, b"typed")
    assert isinstance(error, sdk.QueueFull)
    assert (error.reason, error.retry_after_s, str(error)) == ("QUEUE_FULL", 2.0, "full")


@pytest.mark.parametrize("shape", ["Unary", "Stream"])
async def test_a_bug_becomes_internal_without_its_text(
    channel: grpc.aio.Channel, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = await call(channel, shape, b"bug")
    assert error.code is grpc.StatusCode.INTERNAL
    assert SECRET not in str(error)
    assert "handler failed" in caplog.text


@pytest.mark.parametrize("shape", ["Unary", "Stream"])
async def test_a_handlers_own_abort_is_left_alone(channel: grpc.aio.Channel, shape: str) -> None:
    assert (await call(channel, shape, b"abort")).code is grpc.StatusCode.NOT_FOUND


async def test_a_client_that_disconnects_is_no_error(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    stream = raw(channel).unary_stream("/paceline.test/Stream")(b"fine")
    await stream.read()
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.read()
    assert await raw(channel).unary_unary("/paceline.test/Unary")(b"") == b"fine"
    assert "handler failed" not in caplog.text


class Gone:
    """A context whose client has left, which gRPC is only about to notice."""

    def cancelled(self) -> bool:
        return False

    done = cancelled

    def peer(self) -> str:
        return "unix:"

    async def write(self, message: bytes) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch": (<SendMessageOperation>,)')

    async def abort_with_status(self, status: grpc.Status) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch": (<SendStatusFromServerOperation>,)')


@pytest.mark.parametrize("behaviour", [raising, raising_late])
async def test_a_client_that_disconnects_during_a_write_is_no_error(
    behaviour: Any, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = StatusInterceptor(Credentials(), NO_AUDIT)._guarded(behaviour, "/paceline.test/Stream")
    with pytest.raises(asyncio.CancelledError):  # on which grpc.aio says nothing
        await guarded(b"typed", Gone())
    assert not caplog.records


async def test_a_call_that_is_misused_is_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    async def misusing(request: bytes, context: Any) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch: 8 with grpc_call_error value: ...")

    guarded = StatusInterceptor(Credentials(), NO_AUDIT)._guarded(misusing, "/paceline.test/Stream")
    with pytest.raises(asyncio.CancelledError):
        await guarded(b"", Gone())
    assert "handler failed" in caplog.text


async def test_a_handler_may_encode_its_message_itself() -> None:
    message = pb.TokenizeResponse(token_ids=[1, 300])

    async def encoding(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return message.SerializeToString() if request else message

    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(
            encoding, response_serializer=pb.TokenizeResponse.SerializeToString
        )
    }
    server = grpc.aio.server(interceptors=[StatusInterceptor(Credentials(), NO_AUDIT)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("paceline.test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = raw(channel).unary_unary(
            "/paceline.test/Unary", response_deserializer=pb.TokenizeResponse.FromString
        )
        assert [await method(request) for request in (b"", b"x")] == [message, message]
    await server.stop(None)
