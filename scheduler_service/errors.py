"""ServiceError: the one exception with which a request is refused or fails, and its reasons.

`rpc/statuses.py` maps each reason to a gRPC status. `of_admission` and `of_failure` make a ServiceError of
the core's refusals and failures. Any other exception is a bug: it is logged, and the client gets INTERNAL
without the exception's text.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from scheduler_service.core import errors as core_errors
from scheduler_service.core.events import Failed, Failure


class ErrorReason(enum.Enum):
    """Why a request was refused or failed: names of the proto's ErrorReason, without its prefix."""

    INVALID_REQUEST = enum.auto()  # a field is malformed or too large, or the request can never fit
    UNSUPPORTED = enum.auto()  # a field is set whose feature this scheduler does not have
    MODEL_NOT_FOUND = enum.auto()
    TOKENIZER_NOT_FOUND = enum.auto()  # the model has no tokenizer
    CONTINUATION = enum.auto()  # the stream to be continued had another prompt, model or sampler
    DUPLICATE_REQUEST = enum.auto()  # the caller has a live request of this id
    PERMISSION = enum.auto()  # the caller is not an administrator, or not allowed at this port
    QUEUE_FULL = enum.auto()
    QUOTA = enum.auto()  # the caller's queued requests fill its share of the queue
    TOO_LATE = enum.auto()  # predicted to miss its deadline: refused before anything is computed
    NOT_READY = enum.auto()  # no executor is ready, or none has been ready since the start
    DRAINING = enum.auto()  # refused during a drain
    SHUTTING_DOWN = enum.auto()  # ended because a drain took too long, or was cut short
    ABORTED = enum.auto()  # by Abort, or because the client disconnected
    REPLACED = enum.auto()  # by a resend of the same request
    STALLED_READER = enum.auto()  # the client did not read its stream
    DEADLINE_EXCEEDED = enum.auto()
    ADAPTER_NAME = enum.auto()  # the name belongs to another adapter, or to one that is being unloaded
    ADAPTER_MEMORY = enum.auto()  # an executor has no room for a further adapter
    ADAPTERS_DIFFER = enum.auto()  # executors hold different adapters under one path
    ADDRESS_TAKEN = enum.auto()  # another entry of the directory has the address
    OLD_GENERATION = enum.auto()  # the directory's entry has a higher generation
    DIRECTORY_FULL = enum.auto()
    WATCHERS = enum.auto()  # the caller, or all callers together, watch too often
    INTERNAL = enum.auto()  # a bug, or a fault that retries did not overcome
    EXECUTORS_LOST = enum.auto()  # several executors were lost while they computed this request
    NOT_FINITE = enum.auto()  # a logit was NaN or infinite
    EXECUTOR_REFUSED = enum.auto()  # the executor refused the request's row, for good


class ServiceError(Exception):
    """A request was refused or has failed.

    `retry_after_s`: seconds after which the same request may be sent again; None: it should not be.
    `metadata`: details for programs; "field" is the request's field at fault.
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
        """The request's field at fault; "" if there is none."""
        return self.metadata.get("field", "")


def _field_error(reason: ErrorReason, field: str, problem: str) -> ServiceError:
    return ServiceError(reason, f"{field}: {problem}", metadata={"field": field})


def invalid(field: str, problem: str) -> ServiceError:
    """An error: this field is malformed or too large."""
    return _field_error(ErrorReason.INVALID_REQUEST, field, problem)


def unsupported(field: str, problem: str = "this scheduler does not offer it") -> ServiceError:
    """An error: this field is set, and this scheduler does not have its feature."""
    return _field_error(ErrorReason.UNSUPPORTED, field, problem)


def not_served(method: str) -> ServiceError:
    """An error: this scheduler does not have what the method is for."""
    return ServiceError(ErrorReason.UNSUPPORTED, f"{method}: this scheduler does not offer it")


def mismatch(field: str, problem: str) -> ServiceError:
    """An error: the request to be continued is not the one that would run here."""
    return _field_error(ErrorReason.CONTINUATION, field, problem)


RETRY_AFTER_S = 1.0
"""`retry_after_s` where the core predicts no time: no executor is ready, a drain, a busy tokenizer."""

_FIELDS = {"max_tokens": "stop.max_tokens"}
"""The proto's names of fields whose names in the core differ."""

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
    Failure.GRAMMAR: ErrorReason.INVALID_REQUEST,
}


def of_admission(error: core_errors.AdmissionError) -> ServiceError:
    """The client's error for a request that the core refused."""
    match error:
        case core_errors.NeverFits():
            return invalid(_FIELDS.get(error.field, error.field), error.message)
        case core_errors.IdInUse():
            return ServiceError(ErrorReason.DUPLICATE_REQUEST, "request_id: it is live")
        case core_errors.NoRoom():
            details = {"identity": error.identity, "limit": error.limit}
            return ServiceError(
                _REFUSALS[type(error)],
                str(error),
                retry_after_s=error.retry_after_s,
                metadata={name: value for name, value in details.items() if value},
            )
        case core_errors.NotReady():
            return ServiceError(ErrorReason.NOT_READY, str(error), retry_after_s=RETRY_AFTER_S)
    return ServiceError(ErrorReason.INTERNAL, "the request could not be admitted")


def reason_of(failure: Failure) -> ErrorReason:
    """The client's reason for a request that the core has ended."""
    return _FAILURES[failure]


def of_failure(failed: Failed, grammar_field: str = "grammar") -> ServiceError:
    """The client's error for a request that the core has ended. `grammar_field`: of which its grammar is."""
    if failed.failure is Failure.GRAMMAR:
        return invalid(grammar_field, failed.message)
    may_retry = failed.failure is Failure.NO_EXECUTOR and not failed.emitted
    retry_after_s = RETRY_AFTER_S if may_retry else None
    return ServiceError(reason_of(failed.failure), failed.message, retry_after_s=retry_after_s)
