"""Every reason has one status, and nothing but statuses leaves the process."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc as rpc

from executor_service.errors import CODE_OF, STATUS_OF, ErrorInterceptor
from executor_service.plan import Reason, StepRefused


def test_every_reason_has_a_status() -> None:
    assert set(STATUS_OF) == set(Reason)


def test_a_reason_is_named_as_its_status() -> None:
    for reason, status in STATUS_OF.items():
        assert reason.name == status.name
        assert CODE_OF[reason] == status.value[0]
    assert grpc.StatusCode.UNKNOWN not in STATUS_OF.values()


async def test_what_a_handler_raises_leaves_as_internal_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(rpc.ExecutorServiceServicer):
        async def GetInfo(self, request: pb.GetInfoRequest, context: object) -> pb.GetInfoResponse:  # noqa: N802
            raise KeyError("the secret")

        async def GetStatus(self, request: pb.GetStatusRequest, context: object) -> pb.GetStatusResponse:  # noqa: N802
            raise StepRefused(Reason.UNAVAILABLE, "loading: weights (50%)")

    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    rpc.add_ExecutorServiceServicer_to_server(Broken(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = rpc.ExecutorServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetInfo(pb.GetInfoRequest())
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in str(caught.value)
            assert "the secret" in caplog.text
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(pb.GetStatusRequest())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "loading: weights (50%)"
    finally:
        await server.stop(None)
