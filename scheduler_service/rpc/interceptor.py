"""The one way out for exceptions: a typed status, never a stack, never UNKNOWN."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from paceline.malformed import Malformed, lenient
from paceline.service.audit import Audit
from paceline.service.credentials import Credentials
from paceline.service.logs import Log
from paceline.service.status import end_call, has_left

from scheduler_service.errors import ErrorReason, ServiceError, invalid
from scheduler_service.rpc.statuses import CODES, status_of

log = Log(__name__)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_OURS = "/paceline."
_GENERATING = ("/Generate", "/GenerateUnary")

Admit: TypeAlias = Callable[[_Context], Awaitable[None]]
"""Raises a ServiceError if a call is refused of whose message nothing is known yet."""


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Maps what our handlers raise. They are coroutines, so that no message pays for this.

    With `admit`, calls of Generate and GenerateUnary are asked about there, and read afterwards.
    """

    def __init__(self, credentials: Credentials, audit: Audit, admit: Admit | None = None) -> None:
        self._credentials, self._audit, self._admit = credentials, audit, admit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Put a guard around one of our handlers; others are left alone."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler
        method = handler_call_details.method
        if self._admit is not None and method.endswith(_GENERATING):
            return grpc.stream_stream_rpc_method_handler(
                self._guarded(_reading(handler, self._admit), method),
                lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._guarded(handler.unary_stream, method),
                lenient(handler.request_deserializer),
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._guarded(handler.unary_unary, method),
            lenient(handler.request_deserializer),
            _unless_encoded(handler.response_serializer),
        )

    def _guarded(self, behaviour: Any, method: str) -> Any:
        """`behaviour` is a coroutine function; the types of handlers know only the blocking kind."""

        async def guarded(request: Any, context: _Context) -> Any:
            try:
                if isinstance(request, Malformed):
                    raise invalid("request", request.message)
                return await behaviour(request, context)
            except ServiceError as error:
                failure = error
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                if has_left(error):
                    raise asyncio.CancelledError from None
                if context.cancelled() or context.done():  # a write to a client that has just left
                    return None
                log.error("handler failed", error, method=method)
                failure = ServiceError(ErrorReason.INTERNAL, "internal error; the scheduler's log has more")
            caller, reason = self._credentials.identify(context), failure.reason
            self._audit.failed(caller.name, method, CODES[reason], reason.name)
            return await end_call(context, status_of(failure))

        return guarded


def _reading(handler: _Handler, admit: Admit) -> Any:
    """The handler of one message as one of a stream, which gRPC does not read by itself."""
    behaviour: Any = handler.unary_stream or handler.unary_unary

    async def read(_requests: object, context: _Context) -> None:
        await admit(context)
        request = await context.read()
        if request is grpc.aio.EOF:
            raise invalid("request", "is missing")
        if isinstance(request, Malformed):
            raise invalid("request", request.message)
        response = await behaviour(request, context)
        if response is not None:
            await context.write(response)

    return read


def _unless_encoded(serializer: Any) -> Any:
    """For a handler that may return the bytes of its message."""
    return lambda message: message if isinstance(message, bytes) else serializer(message)
