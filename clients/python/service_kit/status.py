"""gRPC statuses with google.rpc details, as both services send them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "paceline"


def rich_status(
    code: grpc.StatusCode,
    message: str,
    *,
    reason: str,
    metadata: Mapping[str, str] | None = None,
    field: str = "",
    retry_after_s: float | None = None,
) -> grpc.Status:
    """A status for `context.abort_with_status`.

    Its details are ErrorInfo with `reason` (an ErrorReason without its prefix) and `metadata`; BadRequest if
    `field` names the field at fault; RetryInfo if the call may succeed after `retry_after_s` seconds.
    """
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata or {})
    ]
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status: grpc.Status = rpc_status.to_status(
        status_pb2.Status(
            code=code.value[0], message=message, details=[_packed(detail) for detail in details]
        )
    )
    return status


def client_has_left(error: BaseException) -> bool:
    """Whether a handler's exception means that the client has disconnected.

    gRPC raises InternalError when it writes to a disconnected client, before `context.cancelled()` is true.
    An InternalError whose text contains `grpc_call_start_batch` means something else: the handler misused
    the call, for example by writing after its end.
    """
    return isinstance(error, grpc.aio.InternalError) and "grpc_call_start_batch" not in str(error)


async def end_call(context: grpc.aio.ServicerContext[Any, Any], status: grpc.Status) -> NoReturn:
    """End the call with this status. Always raises: AbortError, or CancelledError if the client has left.

    gRPC keeps the AbortError in the call's state, and its traceback keeps the frames of those who awaited
    this. They must not refer to the call at that time (`ending = end_call(...); del context; await ending`).
    Otherwise each refused call is a cycle, and collecting thousands of them stops the process for 0.1 s.
    """
    ending = context.abort_with_status(status)
    del context
    try:
        await ending
    except grpc.aio.InternalError as error:
        if not client_has_left(error):
            raise
        raise asyncio.CancelledError from None
    raise AssertionError("abort_with_status returned")


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
