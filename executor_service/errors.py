"""One table from a reason to a gRPC status, and the interceptor that lets no other one out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from paceline.malformed import Malformed, lenient
from paceline.service.logs import Log

from executor_service.plan import Reason, StepRefused

log = Log(__name__)

STATUS_OF: dict[Reason, grpc.StatusCode] = {
    Reason.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Reason.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.FAILED_PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}

CODE_OF: dict[Reason, int] = {reason: status.value[0] for reason, status in STATUS_OF.items()}
"""The google.rpc.Code of each reason."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """A handler's StepRefused becomes its status, anything else INTERNAL: that text stays in our log."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of one call."""
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _guarded(method, handler.unary_unary),
                lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                _guarded(method, handler.stream_stream),
                lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        return handler  # health's Watch and reflection, which are not ours


def _guarded(method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            request = _checked_stream(request) if hasattr(request, "__aiter__") else _checked(request)
            result = behaviour(request, context)
            if hasattr(result, "__aiter__"):  # written as a generator, as reflection's is
                async for response in result:
                    await context.write(response)
                return None
            return await result
        except StepRefused as error:
            await context.abort(STATUS_OF[error.refusal.reason], error.refusal.message)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            log.error("an RPC failed", error, method=method)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; the executor's log says more")

    return call


def _checked(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise StepRefused(Reason.INVALID_ARGUMENT, f"request: {request.message}")
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)
