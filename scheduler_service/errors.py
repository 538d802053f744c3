"""What a request can end badly with: one exception, of which a reason says what happened.

Each door has its own words for a reason (`rpc/statuses.py`: a gRPC status). The core's refusals and failures
become these in `of_admission` and `of_failure`; any other exception is a bug: it is logged, and leaves as
INTERNAL without its text.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from scheduler_service.core import errors as core_errors
from scheduler_service.core.events import Failed, Failure


class ErrorReason(enum.Enum):
    """Why a request ended badly, under the names of the public contract."""

    INVALID_REQUEST = enum.auto()  # a parameter is bad or too large, or it can never fit; names the field
    UNSUPPORTED = enum.auto()  # a field is set whose feature is missing here
    MODEL_NOT_FOUND = enum.auto()
    TOKENIZER_NOT_FOUND = enum.auto()  # the model has none
    CONTINUATION = enum.auto()  # another prompt, model or sampler than the one continued
    DUPLICATE_REQUEST = enum.auto()  # the request_id is live
    PERMISSION = enum.auto()  # the caller is no administrator
    QUEUE_FULL = enum.auto()
    QUOTA = enum.auto()  # the caller's own requests fill its share of the queue
    TOO_LATE = enum.auto()  # predicted to miss its deadline: refused before anything is computed
    NOT_READY = enum.auto()  # loading, or no executor
    DRAINING = enum.auto()  # no new requests are taken
    SHUTTING_DOWN = enum.auto()  # ended by a drain that took too long
    ABORTED = enum.auto()  # by Abort, or its client left
    REPLACED = enum.auto()  # a resend of the same request took its place
    STALLED_READER = enum.auto()  # the client stopped reading
    DEADLINE_EXCEEDED = enum.auto()
    INTERNAL = enum.auto()  # a fault that could not be healed
    EXECUTORS_LOST = enum.auto()  # several, while they computed it
    NOT_FINITE = enum.auto()  # its logits
    EXECUTOR_REFUSED = enum.auto()  # its row, for good


class ServiceError(Exception):
    """A request's bad end. `retry_after_s` is set where the same request may then be sent again.

    metadata: facts for programs; under "field" the name of the field that is at fault.
    """

    def __init__(
        self,
        reason: ErrorReason,
        message: str,
        *,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})

    @property
    def field(self) -> str:
        """The field that is at fault; "": none is."""
        return self.metadata.get("field", "")


def _at_fault(reason: ErrorReason, field: str, problem: str) -> ServiceError:
    return ServiceError(reason, f"{field}: {problem}", metadata={"field": field})


def invalid(field: str, problem: str) -> ServiceError:
    """A parameter is bad or too large."""
    return _at_fault(ErrorReason.INVALID_REQUEST, field, problem)


def unsupported(field: str) -> ServiceError:
    """A field is set whose feature is missing here."""
    return _at_fault(ErrorReason.UNSUPPORTED, field, "this scheduler does not offer it")


def mismatch(field: str, problem: str) -> ServiceError:
    """What is to be continued is not what would run here."""
    return _at_fault(ErrorReason.CONTINUATION, field, problem)


RETRY_AFTER_S = 1.0
"""The hint while loading, or while no executor is there."""

_FIELDS = {"max_tokens": "stop.max_tokens"}
"""The core's names of fields that the proto calls otherwise."""

_REFUSALS: Mapping[type[core_errors.NoRoom], ErrorReason] = {
    core_errors.NoRoom: ErrorReason.QUEUE_FULL,
    core_errors.QuotaUsed: ErrorReason.QUOTA,
    core_errors.TooLate: ErrorReason.TOO_LATE,
}

_FAILURES: Mapping[Failure, ErrorReason] = {
    Failure.DEADLINE: ErrorReason.DEADLINE_EXCEEDED,
    Failure.CANCELLED: ErrorReason.ABORTED,
    Failure.NO_EXECUTOR: ErrorReason.NOT_READY,
    Failure.POISON: ErrorReason.EXECUTORS_LOST,
    Failure.NOT_FINITE: ErrorReason.NOT_FINITE,
    Failure.REFUSED: ErrorReason.EXECUTOR_REFUSED,
}


def of_admission(error: core_errors.AdmissionError) -> ServiceError:
    """What the client is told when the core does not take its request."""
    match error:
        case core_errors.NeverFits():
            return invalid(_FIELDS.get(error.field, error.field), error.message)
        case core_errors.IdInUse():
            return ServiceError(ErrorReason.DUPLICATE_REQUEST, "request_id: it is live")
        case core_errors.NoRoom():
            known = {"identity": error.identity, "limit": error.limit}
            return ServiceError(
                _REFUSALS[type(error)],
                str(error),
                retry_after_s=error.retry_after_s,
                metadata={name: value for name, value in known.items() if value},
            )
        case core_errors.NotReady():
            return ServiceError(ErrorReason.NOT_READY, str(error), retry_after_s=RETRY_AFTER_S)
    return ServiceError(ErrorReason.INTERNAL, "the request could not be admitted")


def of_failure(failed: Failed) -> ServiceError:
    """What the client is told when the core ends its request."""
    may_retry = failed.failure is Failure.NO_EXECUTOR and not failed.emitted
    retry_after_s = RETRY_AFTER_S if may_retry else None
    return ServiceError(_FAILURES[failed.failure], failed.message, retry_after_s=retry_after_s)
