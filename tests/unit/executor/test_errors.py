"""Every reason has one status, and nothing but statuses leaves the process."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import grpc.aio
import pytest
from paceline.errors import from_status
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc as rpc
from service_kit.audit import Audit
from service_kit.credentials import Credentials

from executor_service.contract.plan import Reason, Refusal, RequestRefused
from executor_service.rpc.errors import CODE_OF, STATUS_OF, ErrorInterceptor, status_of


def test_every_reason_has_a_status() -> None:
    assert set(STATUS_OF) == set(Reason)


def test_reasons_are_the_contracts_and_have_the_code_that_it_names() -> None:
    assert {f"ERROR_REASON_{reason.name}" for reason in Reason} == set(pb.ErrorReason.keys()) - {
        "ERROR_REASON_UNSPECIFIED"
    }
    proto = Path(__file__).parents[3] / "protos/paceline/executor/v1/executor.proto"
    told = dict(re.findall(r"ERROR_REASON_(\w+) = \d+; // ([A-Z_]+)", proto.read_text()))
    for reason, status in STATUS_OF.items():
        assert told[reason.name] == status.name
        assert CODE_OF[reason] == status.value[0]


def test_a_status_carries_its_reason_and_the_kv_length() -> None:
    status = status_of(Refusal(Reason.KV_LENGTH, "expected 3, is 2", 2))
    assert (status.code, status.details) == (grpc.StatusCode.FAILED_PRECONDITION, "expected 3, is 2")
    error = from_status(status.code, status.details, status.trailing_metadata)
    assert (error.reason, dict(error.metadata)) == ("KV_LENGTH", {"kv_length": "2"})


async def test_what_a_handler_raises_leaves_as_internal_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(rpc.ExecutorServiceServicer):
        async def GetInfo(self, request: pb.GetInfoRequest, context: object) -> pb.GetInfoResponse:  # noqa: N802
            raise KeyError("the secret")

        async def GetStatus(self, request: pb.GetStatusRequest, context: object) -> pb.GetStatusResponse:  # noqa: N802
            raise RequestRefused(Reason.LOADING, "loading: weights (50%)")

    counted: list[tuple[str, str]] = []
    server = grpc.aio.server(
        interceptors=[
            ErrorInterceptor(Credentials(), Audit((pb.DESCRIPTOR,), lambda *call: counted.append(call)))
        ]
    )
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
            assert counted == [("GetInfo", "INTERNAL"), ("GetStatus", "LOADING")]
    finally:
        await server.stop(None)
