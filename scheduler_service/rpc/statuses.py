"""The mapping of errors to gRPC statuses with google.rpc details."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import grpc
from service_kit.status import rich_status

from scheduler_service.errors import RETRY_AFTER_S, ErrorReason, ServiceError, invalid, unsupported
from scheduler_service.text.errors import BusyError, ChatTemplateUnusable, PromptError, StuckError

CODES: Mapping[ErrorReason, grpc.StatusCode] = {
    ErrorReason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorReason.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorReason.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorReason.TOKENIZER_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorReason.CONTINUATION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.DUPLICATE_REQUEST: grpc.StatusCode.ALREADY_EXISTS,
    ErrorReason.PERMISSION: grpc.StatusCode.PERMISSION_DENIED,
    ErrorReason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,  # with RetryInfo, as the next two
    ErrorReason.QUOTA: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.TOO_LATE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.NOT_READY: grpc.StatusCode.UNAVAILABLE,  # with RetryInfo until tokens were sent
    ErrorReason.DRAINING: grpc.StatusCode.UNAVAILABLE,  # with RetryInfo: another scheduler may take it
    ErrorReason.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    ErrorReason.ADAPTER_NAME: grpc.StatusCode.ALREADY_EXISTS,
    ErrorReason.ADAPTER_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.ADAPTERS_DIFFER: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.ADDRESS_TAKEN: grpc.StatusCode.ALREADY_EXISTS,
    ErrorReason.OLD_GENERATION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorReason.DIRECTORY_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.WATCHERS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorReason.ABORTED: grpc.StatusCode.ABORTED,
    ErrorReason.REPLACED: grpc.StatusCode.ABORTED,
    ErrorReason.STALLED_READER: grpc.StatusCode.ABORTED,
    ErrorReason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorReason.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorReason.EXECUTORS_LOST: grpc.StatusCode.INTERNAL,
    ErrorReason.NOT_FINITE: grpc.StatusCode.INTERNAL,
    ErrorReason.EXECUTOR_REFUSED: grpc.StatusCode.INTERNAL,
}


def status_of(error: ServiceError) -> grpc.Status:
    """The gRPC status of an error."""
    return rich_status(
        CODES[error.reason],
        error.message,
        reason=error.reason.name,
        metadata=error.metadata,
        field=error.field,
        retry_after_s=error.retry_after_s,
    )


@contextmanager
def text_errors(field: str) -> Iterator[None]:
    """Errors of the tokenizer processes as ServiceError. `field`: what is at fault if they don't say."""
    try:
        yield
    except PromptError as error:
        raise invalid(error.field or field, str(error)) from error
    except ChatTemplateUnusable as error:
        raise unsupported(error.field or field, str(error)) from error
    except BusyError as error:
        raise ServiceError(ErrorReason.QUEUE_FULL, str(error), retry_after_s=RETRY_AFTER_S) from error
    except StuckError as error:
        raise ServiceError(ErrorReason.INTERNAL, str(error)) from error
