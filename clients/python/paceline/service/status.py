"""A gRPC status with google.rpc details, as both services send it."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
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

    It has ErrorInfo with `reason` (an ErrorReason without its prefix) and `metadata`; BadRequest if a
    `field` is at fault; RetryInfo if waiting for `retry_after_s` seconds helps.
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


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
