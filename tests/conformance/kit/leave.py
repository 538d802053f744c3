"""Clients that leave in the middle of a step, by a cancel or by their deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from paceline.executor.v1 import executor_pb2 as pb

from tests.conformance.kit.client import Executor, Session

Leave = Callable[[Executor, str, Any], None]


def cancelled(executor: Executor, rpc: str, request: Any) -> None:
    """Send a request, and cancel it once it is being computed, if it is not done before that is seen."""
    call = executor.begin(rpc, request)
    while not call.done() and not running(executor):
        pass
    call.cancel()


def expired(executor: Executor, rpc: str, request: Any) -> None:
    """Send a request with less time than a long step takes."""
    call = getattr(executor.stub, rpc).future(request, timeout=0.05, metadata=executor.metadata)
    assert call.exception() is None or call.code() is grpc.StatusCode.DEADLINE_EXCEEDED, call.details()


def running(executor: Executor) -> bool:
    """Whether the executor says that it computes."""
    return executor.status().step_age_s > 0


def settle(session: Session) -> pb.GetStatusResponse:
    """Wait until whatever was sent before has ended; the status then.

    Steps are computed in order, so an empty one is done last.
    """
    session.step()
    return session.executor.status()
