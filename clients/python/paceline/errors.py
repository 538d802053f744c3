"""Everything the SDK raises about a call.

    PacelineError
    ├── InvalidRequest         a parameter is bad or too large; the message names the field
    ├── DuplicateRequest       the request_id (or cache_id) is in use
    ├── NotFound               unknown or released cache, unknown session
    ├── StaleState             not the KV length, epoch or step order you think
    ├── Unauthenticated        missing or wrong token or certificate
    ├── Unsupported            the service does not offer this
    ├── RetryLater             nothing was emitted: try again after `retry_after_s`
    │   ├── QueueFull          no room: the queue is full (scheduler), or pages ran out (executor)
    │   └── Unavailable        not reachable, loading, draining, or without an executor
    ├── StreamLost             interrupted after tokens were received, and could not be continued anywhere
    ├── Cancelled              aborted by someone, or this reader stalled
    ├── DeadlineExceeded       `timeout_s` went by
    ├── InternalError          a fault that could not be healed, or an answer that is not whole (DATA_LOSS)
    └── StepRefused            executor streams: one step was refused whole, and the stream lives

`from_rpc` is the one place where gRPC statuses become these. A bad argument that never leaves the
process is an InvalidRequest too; a wrong *type* is a plain TypeError.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_STATUS_DETAILS = "grpc-status-details-bin"
_NO_METADATA: Mapping[str, str] = MappingProxyType({})


class PacelineError(Exception):
    """The root of the tree.

    `code` is the gRPC status, `reason` the service's own name for the cause (ErrorInfo.reason, ""
    if it gave none) and `metadata` what it added to that.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] = _NO_METADATA,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.reason = reason
        self.metadata = metadata


class InvalidRequest(PacelineError):
    """A parameter is bad or too large, or the request can never fit. Do not retry."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class DuplicateRequest(PacelineError):
    """The request_id is live, or the cache_id was used before. Choose another."""

    code = grpc.StatusCode.ALREADY_EXISTS


class NotFound(PacelineError):
    """Unknown or released cache, unknown session. Open it again."""

    code = grpc.StatusCode.NOT_FOUND


class StaleState(PacelineError):
    """Not the KV length, epoch or step order that the client thinks. Look, then decide."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unauthenticated(PacelineError):
    """The token or the client certificate is missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Unsupported(PacelineError):
    """The service does not offer this."""

    code = grpc.StatusCode.UNIMPLEMENTED


class RetryLater(PacelineError):
    """Nothing was emitted; the same request may succeed after `retry_after_s` seconds.

    None: the service gave no hint; use a backoff of your own.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] = _NO_METADATA,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code, reason=reason, metadata=metadata)
        self.retry_after_s = retry_after_s


class QueueFull(RetryLater):
    """No room now: the scheduler's queue is full, or the executor's pages or sequences ran out."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(RetryLater):
    """Not reachable, loading, draining, or without an executor."""

    code = grpc.StatusCode.UNAVAILABLE


class StreamLost(PacelineError):
    """A stream was interrupted after events had been received, and could not be continued, here or on
    another scheduler. What was received is valid, but not all; a new request begins anew.
    """

    code = grpc.StatusCode.UNAVAILABLE


class Cancelled(PacelineError):
    """Ended by the caller, by Abort, by a resend, or because this reader stalled; `reason` says which."""

    code = grpc.StatusCode.CANCELLED


class DeadlineExceeded(PacelineError):
    """The deadline given as `timeout_s` went by."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class InternalError(PacelineError):
    """A fault that could not be healed, or an answer that can't be parsed or is not whole, though its
    status is OK (`code` is then INTERNAL or DATA_LOSS). Not your request's doing; report it.
    """

    code = grpc.StatusCode.INTERNAL


class StepRefused(PacelineError):
    """A step on a stream was refused whole: nothing has changed, and the stream lives.

    `__cause__` is what a unary call would have raised.
    """


BY_CODE: Mapping[grpc.StatusCode, type[PacelineError]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
        grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
        grpc.StatusCode.ALREADY_EXISTS: DuplicateRequest,
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.FAILED_PRECONDITION: StaleState,
        grpc.StatusCode.ABORTED: Cancelled,
        grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
        grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
        grpc.StatusCode.UNIMPLEMENTED: Unsupported,
        grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
        grpc.StatusCode.UNAVAILABLE: Unavailable,
        grpc.StatusCode.CANCELLED: Cancelled,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.INTERNAL: InternalError,
        grpc.StatusCode.UNKNOWN: InternalError,
        grpc.StatusCode.DATA_LOSS: InternalError,
    }
)
"""Every status but OK has its error."""

_BY_NUMBER: Mapping[int, grpc.StatusCode] = MappingProxyType(
    {code.value[0]: code for code in grpc.StatusCode}
)


def from_rpc(error: grpc.RpcError) -> PacelineError:
    """The SDK's error for one of gRPC's, blocking or asyncio."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return InternalError(str(error))
    return from_status(error.code(), error.details() or "", error.trailing_metadata())


def from_status(code: grpc.StatusCode, message: str, trailers: object = ()) -> PacelineError:
    """The SDK's error for a finished call's status and trailing metadata."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return InvalidRequest(f"message too large for this link: {message}")  # gRPC's own, before any service
    reason, metadata, retry_after_s = _details(trailers)
    if code is grpc.StatusCode.CANCELLED and not reason:
        # No service of ours says so: a server that stops cancels what it has not begun, a closed channel too.
        return Unavailable(message or "the connection was closed")
    return _make(code, message, reason, metadata, retry_after_s)


def from_code(code: int, message: str) -> PacelineError:
    """The SDK's error for a google.rpc.Code that came as a value: of one row, op or step."""
    return _make(_BY_NUMBER.get(code, grpc.StatusCode.UNKNOWN), message, "", _NO_METADATA, None)


def incomplete(message: str) -> InternalError:
    """The error for an answer that is not whole though its status is OK."""
    return InternalError(message, code=grpc.StatusCode.DATA_LOSS)


def _make(
    code: grpc.StatusCode,
    message: str,
    reason: str,
    metadata: Mapping[str, str],
    retry_after_s: float | None,
) -> PacelineError:
    kind = BY_CODE.get(code, InternalError)
    text = message or code.name
    if issubclass(kind, RetryLater):
        return kind(text, code=code, reason=reason, metadata=metadata, retry_after_s=retry_after_s)
    return kind(text, code=code, reason=reason, metadata=metadata)


def _details(trailers: object) -> tuple[str, Mapping[str, str], float | None]:
    """ErrorInfo's reason and metadata and RetryInfo's delay in seconds, out of trailing metadata."""
    reason, metadata, retry_after_s = "", _NO_METADATA, None
    for key, value in trailers or ():  # type: ignore[attr-defined]  # two untyped kinds of pairs
        if key != _STATUS_DETAILS:
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            continue  # a peer that writes nonsense there still gave a code and a message
        for detail in status.details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason, metadata = info.reason, MappingProxyType(dict(info.metadata))
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return reason, metadata, retry_after_s
