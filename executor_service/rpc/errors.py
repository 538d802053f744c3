"""The gRPC status of each reason, and the interceptor through which every error of an RPC passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from paceline.executor.v1 import executor_pb2 as pb
from paceline.malformed import Malformed, lenient
from service_kit.audit import Audit
from service_kit.credentials import Credentials
from service_kit.logs import Log
from service_kit.status import client_has_left, end_call, rich_status

from executor_service.contract.plan import Reason, Refusal, RequestRefused

log = Log(__name__)

STATUS_OF: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.STEP_CONTENT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.GRAMMAR: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.ADAPTER_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.CACHE: grpc.StatusCode.NOT_FOUND,
    Reason.SESSION: grpc.StatusCode.NOT_FOUND,
    Reason.TOKENIZER: grpc.StatusCode.NOT_FOUND,
    Reason.ADAPTER: grpc.StatusCode.NOT_FOUND,
    Reason.CACHE_ID_USED: grpc.StatusCode.ALREADY_EXISTS,
    Reason.ADAPTER_NAME: grpc.StatusCode.ALREADY_EXISTS,
    Reason.KV_LENGTH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.EPOCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.FENCED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STEP_GAP: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STEP_FORGOTTEN: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.PAGES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.SEQUENCES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.SESSIONS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUOTA: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.ADAPTER_SLOTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.ADAPTER_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.GRAMMAR_BEHIND: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.LOADING: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.PERMISSION: grpc.StatusCode.PERMISSION_DENIED,
    Reason.NOT_FINITE: grpc.StatusCode.INTERNAL,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}

CODE_OF: dict[Reason, int] = {reason: status.value[0] for reason, status in STATUS_OF.items()}
"""The google.rpc.Code of each reason."""

WIRE_REASON: dict[Reason, pb.ErrorReason.ValueType] = {
    reason: pb.ErrorReason.Value(f"ERROR_REASON_{reason.name}") for reason in Reason
}

_RETRY_AFTER_S = {Reason.QUEUE: 0.1, Reason.LOADING: 1.0}
"""The reasons whose status carries a RetryInfo, with its delay."""


def status_of(refusal: Refusal) -> grpc.Status:
    """The gRPC status of a refusal."""
    metadata = {} if refusal.kv_length is None else {"kv_length": str(refusal.kv_length)}
    return rich_status(
        STATUS_OF[refusal.reason],
        refusal.message,
        reason=refusal.reason.name,
        metadata=metadata,
        retry_after_s=_RETRY_AFTER_S.get(refusal.reason),
    )


_OURS = "/paceline."

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns RequestRefused into its status. Any other exception is logged, and the status is INTERNAL."""

    def __init__(self, credentials: Credentials, audit: Audit) -> None:
        self._credentials, self._audit = credentials, audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of one call."""
        handler = await continuation(details)
        method = details.method
        if handler is None or not method.startswith(_OURS):
            return handler
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                self._guarded(method, handler.unary_unary),
                lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._guarded(method, handler.unary_stream),
                lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                self._guarded(method, handler.stream_stream),
                lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        return handler

    def _guarded(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                request = _checked_stream(request) if hasattr(request, "__aiter__") else _checked(request)
                return await behaviour(request, context)
            except RequestRefused as error:
                refusal = error.refusal
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                if client_has_left(error):
                    raise asyncio.CancelledError from None
                log.error("an RPC failed", error, method=method)
                refusal = Refusal(Reason.INTERNAL, "internal error; the executor's log says more")
            caller = self._credentials.identify(context)
            self._audit.failed(caller.name, method, STATUS_OF[refusal.reason], refusal.reason.name)
            ending = end_call(context, status_of(refusal))
            del request, context, refusal  # otherwise each refused call is a cycle; see end_call
            return await ending

        return call


def _checked(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise RequestRefused(Reason.INVALID, f"request: {request.message}")
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)
