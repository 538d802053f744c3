"""The errors that calls of the SDK raise.

    PacelineError
    ├── InvalidRequest         a parameter is bad or too large; the message names the argument
    ├── DuplicateRequest       the request_id (or cache_id) is in use
    ├── NotFound               unknown or released cache, unknown session, model or adapter
    ├── StaleState             the KV length, epoch or step order differs from what the request expects
    ├── Unauthenticated        missing or wrong token or certificate
    ├── Unsupported            the service does not offer this
    ├── RetryLater             nothing was emitted: try again after `retry_after_s`
    │   ├── QueueFull          the scheduler's queue is full, or the executor's pages or sequences ran out
    │   └── Unavailable        not reachable, loading, draining, or without an executor
    ├── StreamLost             interrupted after tokens were received, and no scheduler could continue it
    ├── Cancelled              aborted, or ended because its reader stalled
    ├── DeadlineExceeded       `timeout_s` passed
    ├── InternalError          a fault of the service, or an incomplete reply (DATA_LOSS)
    ├── InvalidOutput          the call went well, but its output is not the whole value asked for
    └── StepRefused            executor streams: one whole step was refused; the stream stays usable

`from_rpc` and `from_status` map gRPC statuses to these classes. An argument that the SDK itself refuses
raises InvalidRequest too; an argument of a wrong *type* raises TypeError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_STATUS_DETAILS = "grpc-status-details-bin"
_NO_CONNECTION = re.compile(
    r"failed to connect to all addresses; last error: \w+: (?:ipv[46]:)?(?P<address>\S+?): (?P<cause>.+)",
    re.DOTALL,
)
"""What gRPC says of an address at which it could not connect."""
_NO_NAME = re.compile(r"errors resolving (?P<address>\S+): \[.*Domain name not found.*\]", re.DOTALL)
"""What gRPC says of an address whose host has no DNS entry."""
_NO_METADATA: Mapping[str, str] = MappingProxyType({})
_GROUPED = re.compile(r"^(?:sampling|stop|grammar|speculation)\.(?P<field>[a-z_]+)")
_ARGUMENTS = MappingProxyType(
    {
        "stop.strings": "stop",
        "stop.token_ids": "stop_token_ids",
        "grammar.json_schema": "schema",
        "grammar.lark": "grammar",
        "speculation.mode": "speculation",
        "speculation.draft_tokens": "speculation",
        "speculation.drafter": "speculation.drafter",
    }
)
"""Arguments of the SDK that are called otherwise than the contract's fields, which lie in groups there."""


class PacelineError(Exception):
    """The base class.

    `code` is the gRPC status code, `reason` the service's name of the cause (ErrorInfo.reason; "" if the
    service sent none) and `metadata` the details of the cause (ErrorInfo.metadata).
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
    """A running request has this request_id, or the cache_id was used before. Choose another."""

    code = grpc.StatusCode.ALREADY_EXISTS


class NotFound(PacelineError):
    """The cache, session, model or adapter is unknown, or the cache was released. Open or load it again."""

    code = grpc.StatusCode.NOT_FOUND


class StaleState(PacelineError):
    """The KV length, epoch or step order differs from what the request expects. Read the current state
    before the next request.
    """

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unauthenticated(PacelineError):
    """The token or the client certificate is missing or wrong, or does not permit this call."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Unsupported(PacelineError):
    """The service does not offer this."""

    code = grpc.StatusCode.UNIMPLEMENTED


class RetryLater(PacelineError):
    """Nothing was emitted; the same request may succeed after `retry_after_s` seconds.

    `retry_after_s` is None if the service gave no hint: then use a backoff of your own.
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
    """The scheduler's queue is full, or the executor's pages or sequences ran out."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(RetryLater):
    """The service is not reachable, loading, draining, or without an executor."""

    code = grpc.StatusCode.UNAVAILABLE


class StreamLost(PacelineError):
    """A stream was interrupted after events had been received, and no scheduler could continue it.

    The events received are valid but incomplete. A new request starts from the beginning.
    """

    code = grpc.StatusCode.UNAVAILABLE


class Cancelled(PacelineError):
    """Ended by the caller, by Abort, by a resend, or because its reader stalled; `reason` tells which."""

    code = grpc.StatusCode.CANCELLED


class DeadlineExceeded(PacelineError):
    """The deadline given as `timeout_s` passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class InternalError(PacelineError):
    """A fault of the service, or a reply with status OK that can't be parsed (`code` is INTERNAL) or is
    incomplete (DATA_LOSS). The request is not the cause; report it.
    """

    code = grpc.StatusCode.INTERNAL


class InvalidOutput(PacelineError):
    """The call ended OK, but its output is not the value that was asked for: it was cut off, or pydantic
    refuses it. `__cause__` is the error of the parser, if there is one.
    """

    code = grpc.StatusCode.OK


class StepRefused(PacelineError):
    """A whole step on a stream was refused: nothing has changed, and the stream stays usable.

    `__cause__` is the error that the same step would have raised as a unary call.
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
"""The error class of every status code but OK."""

_BY_NUMBER: Mapping[int, grpc.StatusCode] = MappingProxyType(
    {code.value[0]: code for code in grpc.StatusCode}
)


def from_rpc(error: grpc.RpcError) -> PacelineError:
    """The SDK's error for an exception of gRPC, blocking or asyncio."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return InternalError(str(error))
    return from_status(error.code(), error.details() or "", error.trailing_metadata())


def from_status(code: grpc.StatusCode, message: str, trailers: object = ()) -> PacelineError:
    """The SDK's error for a finished call's status and trailing metadata."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        # gRPC itself refuses such a message, before a service sees it.
        return InvalidRequest(f"message too large for this link: {message}")
    reason, metadata, retry_after_s = _details(trailers)
    if code is grpc.StatusCode.CANCELLED and not reason:
        # Paceline's services always send a reason. gRPC sends none when a server that stops cancels calls it
        # has not begun, and when this client cancels the call or closes the channel.
        return Unavailable(message or "the connection was closed")
    return _make(code, message, reason, metadata, retry_after_s)


def from_code(code: int, message: str) -> PacelineError:
    """The SDK's error for a google.rpc.Code inside a reply: the code of one row, op or step."""
    return _make(_BY_NUMBER.get(code, grpc.StatusCode.UNKNOWN), message, "", _NO_METADATA, None)


def incomplete(message: str) -> InternalError:
    """The error for an incomplete reply with status OK."""
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
    if kind is Unavailable and (found := _NO_CONNECTION.fullmatch(text)):
        cause = found["cause"].removeprefix("Failed to connect to remote host: ")
        hint = " (nobody listens; `paceline serve` starts a service)" if cause == "Connection refused" else ""
        text = f"failed to connect to {unquote(found['address'])}: {cause}{hint}"
    if kind is Unavailable and (found := _NO_NAME.fullmatch(text)):
        text = f"errors resolving {found['address']}: nobody knows this host name"
    if kind is InvalidRequest and metadata.get("field"):  # of a scheduler, which the SDK's arguments are for
        text = _GROUPED.sub(lambda found: _ARGUMENTS.get(found[0], found["field"]), text, 1)
    if issubclass(kind, RetryLater):
        return kind(text, code=code, reason=reason, metadata=metadata, retry_after_s=retry_after_s)
    return kind(text, code=code, reason=reason, metadata=metadata)


def _details(trailers: object) -> tuple[str, Mapping[str, str], float | None]:
    """(ErrorInfo.reason, ErrorInfo.metadata, RetryInfo's delay in seconds), read from trailing metadata."""
    reason, metadata, retry_after_s = "", _NO_METADATA, None
    for key, value in trailers or ():  # type: ignore[attr-defined]  # two untyped kinds of pairs
        if key != _STATUS_DETAILS:
            continue
        try:
            for detail in status_pb2.Status.FromString(value).details:
                info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
                if detail.Unpack(info):
                    reason, metadata = info.reason, MappingProxyType(dict(info.metadata))
                elif detail.Unpack(retry) and retry.retry_delay.seconds >= 0 <= retry.retry_delay.nanos:
                    retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        except DecodeError:
            continue  # malformed details: the code and the message are still valid
    return reason, metadata, retry_after_s
