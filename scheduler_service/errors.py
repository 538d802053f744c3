"""Everything that a request can end badly with, and its one mapping to a gRPC status.

ServiceError
├── InvalidRequest     INVALID_ARGUMENT    names the field
├── DuplicateRequest   ALREADY_EXISTS      the request_id is live
├── QueueFull          RESOURCE_EXHAUSTED  with RetryInfo
├── NotReady           UNAVAILABLE         loading, draining or no executor, nothing emitted; with RetryInfo
├── Aborted            CANCELLED           Abort, or a forced shutdown
├── StalledReader      CANCELLED           the client stopped reading
├── DeadlineExceeded   DEADLINE_EXCEEDED
└── InternalError      INTERNAL            a fault that could not be healed

The core's refusals and failures become these in `of_admission` and `of_failure`; any other
exception is a bug: it is logged, and leaves as INTERNAL without its text.
"""

from __future__ import annotations

from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from scheduler_service.core import errors as core_errors
from scheduler_service.core.events import Failed, Failure

DOMAIN = "paceline"


class ServiceError(Exception):
    """A request's bad end. `retry_after_s` is set where waiting helps."""

    code: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, metadata: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata = metadata or {}

    def status(self) -> grpc.Status:
        """The status with its google.rpc details, as gRPC wants it."""
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)
        details = [_packed(info)]
        if self.retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        number: int = self.code.value[0]
        status: grpc.Status = rpc_status.to_status(
            status_pb2.Status(code=number, message=self.message, details=details)
        )
        return status


class InvalidRequest(ServiceError):
    """A parameter is bad or too large, or the request can never fit; the message names the field."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}", metadata={"field": field})
        self.field = field


class DuplicateRequest(ServiceError):
    """The request_id is live."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "DUPLICATE_REQUEST"


class QueueFull(ServiceError):
    """No room in the queue now."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class NotReady(ServiceError):
    """Loading, draining or without an executor; nothing was emitted."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "NOT_READY"


class Aborted(ServiceError):
    """Ended by Abort or by a forced shutdown."""

    code = grpc.StatusCode.CANCELLED
    reason = "ABORTED"


class StalledReader(ServiceError):
    """The client did not read its stream."""

    code = grpc.StatusCode.CANCELLED
    reason = "STALLED_READER"


class DeadlineExceeded(ServiceError):
    """The client's deadline."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class InternalError(ServiceError):
    """A fault that could not be healed."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"


RETRY_AFTER_S = 1.0
"""The hint while loading, or while no executor is there."""

_FIELDS = {"prompt": "prompt", "max_tokens": "stop.max_tokens", "n": "n"}
"""The core's names of fields that the proto calls otherwise."""


def of_admission(error: core_errors.AdmissionError) -> ServiceError:
    """What the client is told when the core does not take its request."""
    match error:
        case core_errors.NeverFits():
            return InvalidRequest(_FIELDS.get(error.field, error.field), error.message)
        case core_errors.DuplicateRequest():
            return DuplicateRequest(str(error))
        case core_errors.QueueFull():
            return QueueFull(str(error), retry_after_s=error.retry_after_s)
        case core_errors.NotReady():
            return NotReady(str(error), retry_after_s=RETRY_AFTER_S)
    return InternalError("the request could not be admitted")


def of_failure(failed: Failed) -> ServiceError:
    """What the client is told when the core ends its request."""
    match failed.failure:
        case Failure.DEADLINE:
            return DeadlineExceeded(failed.message)
        case Failure.CANCELLED:
            return Aborted(failed.message)
        case Failure.NO_EXECUTOR if not failed.emitted:
            return NotReady(failed.message, retry_after_s=RETRY_AFTER_S)
        case Failure.NO_EXECUTOR | Failure.POISON | Failure.NOT_FINITE | Failure.REFUSED:
            return InternalError(failed.message)


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
