"""Everything that a request can end badly with, and its one mapping to a gRPC status.

ServiceError
├── InvalidRequest        INVALID_ARGUMENT     names the field
├── Unsupported           UNIMPLEMENTED        names the field whose feature is missing
├── ModelNotFound         NOT_FOUND            no such model
├── TokenizerNotFound     NOT_FOUND            the model has no tokenizer
├── DuplicateRequest      ALREADY_EXISTS       the request_id is live
├── ContinuationMismatch  FAILED_PRECONDITION  another prompt, model or sampler than the one continued
├── PermissionDenied      PERMISSION_DENIED    the caller is no administrator
├── QueueFull             RESOURCE_EXHAUSTED   with RetryInfo
├── QuotaUsed             RESOURCE_EXHAUSTED   the identity's share of the queue is used up; with RetryInfo
├── TooLate               RESOURCE_EXHAUSTED   predicted to miss its deadline; with RetryInfo
├── NotReady              UNAVAILABLE          loading or no executor; with RetryInfo until tokens were sent
├── Draining              UNAVAILABLE          with RetryInfo: another scheduler may take it
├── ShuttingDown          UNAVAILABLE          ended by a drain that took too long
├── Aborted               ABORTED              by Abort
├── Replaced              ABORTED              by a resend of the same request
├── StalledReader         ABORTED              the client stopped reading
├── DeadlineExceeded      DEADLINE_EXCEEDED
└── InternalError         INTERNAL             a fault that could not be healed; `reason` says which

The core's refusals and failures become these in `of_admission` and `of_failure`; any other
exception is a bug: it is logged, and leaves as INTERNAL without its text.
"""

from __future__ import annotations

from typing import ClassVar

import grpc
from paceline.service.status import rich_status

from scheduler_service.core import errors as core_errors
from scheduler_service.core.events import Failed, Failure


class ServiceError(Exception):
    """A request's bad end. `retry_after_s` is set where the same request may then be sent again."""

    code: ClassVar[grpc.StatusCode]
    reason: str  # an ErrorReason of the proto, without its prefix

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, metadata: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata = metadata or {}

    def status(self) -> grpc.Status:
        """The status with its google.rpc details, as gRPC wants it."""
        return rich_status(
            self.code,
            self.message,
            reason=self.reason,
            metadata=self.metadata,
            field=self.metadata.get("field", ""),
            retry_after_s=self.retry_after_s,
        )


class InvalidRequest(ServiceError):
    """A parameter is bad or too large, or the request can never fit; the message names the field."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}", metadata={"field": field})
        self.field = field


class Unsupported(ServiceError):
    """A field is set whose feature is missing here."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNSUPPORTED"

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: this scheduler does not offer it", metadata={"field": field})


class ModelNotFound(ServiceError):
    """No model of this name."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "MODEL_NOT_FOUND"


class TokenizerNotFound(ServiceError):
    """The model has no tokenizer."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "TOKENIZER_NOT_FOUND"


class ContinuationMismatch(ServiceError):
    """What is to be continued is not what would run here."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "CONTINUATION"


class DuplicateRequest(ServiceError):
    """The request_id is live."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "DUPLICATE_REQUEST"


class PermissionDenied(ServiceError):
    """The caller is no administrator."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION"


class QueueFull(ServiceError):
    """No room in the queue now."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class QuotaUsed(ServiceError):
    """The caller's own requests fill its share of the queue."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUOTA"


class TooLate(ServiceError):
    """It would miss its deadline, as things are: refused before anything is computed."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_LATE"


class NotReady(ServiceError):
    """Loading, or without an executor."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "NOT_READY"


class Draining(ServiceError):
    """No new requests are taken."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"


class ShuttingDown(ServiceError):
    """Ended by a drain that took too long."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class Aborted(ServiceError):
    """Ended by Abort."""

    code = grpc.StatusCode.ABORTED
    reason = "ABORTED"


class Replaced(ServiceError):
    """A resend of the same request took its place."""

    code = grpc.StatusCode.ABORTED
    reason = "REPLACED"


class StalledReader(ServiceError):
    """The client did not read its stream."""

    code = grpc.StatusCode.ABORTED
    reason = "STALLED_READER"


class DeadlineExceeded(ServiceError):
    """The client's deadline."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class InternalError(ServiceError):
    """A fault that could not be healed."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(self, message: str, reason: str = "INTERNAL") -> None:
        super().__init__(message)
        self.reason = reason


RETRY_AFTER_S = 1.0
"""The hint while loading, or while no executor is there."""

_FIELDS = {"max_tokens": "stop.max_tokens"}
"""The core's names of fields that the proto calls otherwise."""


_REFUSALS: dict[type[core_errors.QueueFull], type[ServiceError]] = {
    core_errors.QuotaUsed: QuotaUsed,
    core_errors.TooLate: TooLate,
}


def of_admission(error: core_errors.AdmissionError) -> ServiceError:
    """What the client is told when the core does not take its request."""
    match error:
        case core_errors.NeverFits():
            return InvalidRequest(_FIELDS.get(error.field, error.field), error.message)
        case core_errors.DuplicateRequest():
            return DuplicateRequest("request_id: it is live")
        case core_errors.QueueFull():
            kind = _REFUSALS.get(type(error), QueueFull)
            known = {"identity": error.identity, "limit": error.limit}
            metadata = {name: value for name, value in known.items() if value}
            return kind(str(error), retry_after_s=error.retry_after_s, metadata=metadata)
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
        case Failure.NO_EXECUTOR:
            return NotReady(failed.message, retry_after_s=None if failed.emitted else RETRY_AFTER_S)
        case Failure.POISON:
            return InternalError(failed.message, "EXECUTORS_LOST")
        case Failure.NOT_FINITE:
            return InternalError(failed.message, "NOT_FINITE")
        case Failure.REFUSED:
            return InternalError(failed.message, "EXECUTOR_REFUSED")
