"""Verdicts of `paceline doctor` for which no stack has to be started."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import pytest
from paceline import errors
from paceline.channel import Security
from paceline.cli.diagnosis import Verdict, _status_problem, _verdict_on_silence, _verdict_without_scheduler
from paceline.executor.v1 import executor_pb2_grpc


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (errors.from_code(grpc.StatusCode.PERMISSION_DENIED.value[0], "not yours"), Verdict.SLOW),
        (errors.from_code(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "late"), Verdict.FROZEN),
    ],
    ids=["the status is denied", "no status"],
)
def test_a_service_that_denies_its_status_is_not_called_frozen(
    error: errors.PacelineError, verdict: Verdict
) -> None:
    class Unanswering:
        def status(self, *, timeout_s: float) -> Any:
            raise error

    assert _verdict_on_silence(cast(Any, Unanswering()), 1.0) is verdict


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (errors.DeadlineExceeded("late"), Verdict.FROZEN),
        (errors.InternalError("Exception deserializing response!"), Verdict.VERSION),
        (errors.Unavailable("failed to parse the address"), Verdict.FAILED),
        (errors.InternalError("a bug"), Verdict.FAILED),
    ],
    ids=["late", "unreadable", "unavailable", "failed"],
)
def test_an_error_in_place_of_the_status_is_told_apart(error: errors.PacelineError, verdict: Verdict) -> None:
    assert _status_problem(error, 1.0).verdict is verdict


class Failing(executor_pb2_grpc.ExecutorServiceServicer):
    """An executor that can't say how it is."""

    def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        context.abort(grpc.StatusCode.INTERNAL, "a bug")


@pytest.fixture
def server() -> Iterator[tuple[grpc.Server, str]]:
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield server, address
    server.stop(None).wait()


def test_a_service_is_called_foreign_only_if_it_has_none_of_the_methods(
    server: tuple[grpc.Server, str],
) -> None:
    started, address = server
    assert _verdict_without_scheduler(address, Security(), 60.0).verdict is Verdict.NOT_PACELINE
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(Failing(), started)
    failed = _verdict_without_scheduler(address, Security(), 60.0)
    assert (failed.verdict, failed.detail) == (Verdict.FAILED, "a bug")
