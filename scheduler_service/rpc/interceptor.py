"""Turns every exception of a handler into a gRPC status: never UNKNOWN, and without a stack trace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from paceline.malformed import Malformed, lenient
from service_kit.audit import Audit
from service_kit.credentials import Credentials
from service_kit.logs import Log
from service_kit.status import client_has_left, end_call

from scheduler_service.errors import ErrorReason, ServiceError, invalid
from scheduler_service.rpc.load_wait import LoadWait
from scheduler_service.rpc.statuses import CODES, status_of
from scheduler_service.traced_call import CallTracer, call_failed, traced

log = Log(__name__)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_OURS = "/paceline."
_ADMITTED = ("/Generate", "/GenerateUnary", "/Score", "/Embed", "/Rerank")
"""Methods whose calls are queued: they are read only when there may be room for them."""

_WAITING = (*_ADMITTED, "/Tokenize", "/Detokenize", "/GetModelInfo", "/GetTokenizer", "/GetVocabulary")
"""Methods whose calls may wait for a model that is loading."""

Admit: TypeAlias = Callable[[_Context], Awaitable[None]]
"""Called before a call's message is read. Raises ServiceError to refuse the call."""


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of paceline's services, and ends failed calls with a status.

    Handlers are coroutines that write their messages themselves, so streamed messages do not pass through
    here. With `admit`, calls that would be queued are read only after it has returned. `load_wait` is awaited
    before that, by calls that need a model.
    """

    def __init__(
        self,
        credentials: Credentials,
        audit: Audit,
        admit: Admit | None = None,
        *,
        load_wait: LoadWait | None = None,
        tracer: CallTracer | None = None,
        prefix: str = _OURS,
    ) -> None:
        """`prefix`: with which the methods begin whose handlers are wrapped. `tracer`: of queued calls."""
        self._credentials, self._audit, self._admit, self._prefix = credentials, audit, admit, prefix
        self._load_wait, self._tracer = load_wait, tracer
        self._wrapped: dict[str, _Handler] = {}  # by method

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap a handler whose method has the prefix; others are returned unchanged."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._prefix):
            return handler
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            wrapped = self._wrapped[method] = self._wrap(handler, method)
        return wrapped

    def _wrap(self, handler: _Handler, method: str) -> _Handler:
        if self._admit is not None and method.endswith(_ADMITTED):
            return grpc.stream_stream_rpc_method_handler(
                self._guarded(_reading(handler, self._admit), method),
                lenient(handler.request_deserializer),
                _unless_encoded(handler.response_serializer),
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
        """A coroutine function that awaits `behaviour`, another one, and maps its exceptions to statuses."""
        load_wait = self._load_wait if method.endswith(_WAITING) else None
        tracer = self._tracer if method.endswith(_ADMITTED) else None

        async def recorded(request: Any, context: _Context) -> Any:
            with traced(tracer, method.removeprefix("/"), context.invocation_metadata() or ()):
                answer = guarded(request, context)
                del request, context  # see end_call
                return await answer

        async def guarded(request: Any, context: _Context) -> Any:
            try:
                if isinstance(request, Malformed):
                    raise invalid("request", request.message)
                if load_wait is not None:
                    await load_wait(context)
                return await behaviour(request, context)
            except ServiceError as error:
                failure = error
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                if client_has_left(error):
                    raise asyncio.CancelledError from None
                if context.cancelled() or context.done():  # a write to a client that has just left
                    return None
                log.error("handler failed", error, method=method)
                failure = ServiceError(ErrorReason.INTERNAL, "internal error; the scheduler's log has more")
            caller, reason = self._credentials.identify(context), failure.reason
            call_failed(CODES[reason].name, reason.name)
            self._audit.failed(caller.name, method, CODES[reason], reason.name)
            ending = end_call(context, status_of(failure))
            del request, context, failure  # see end_call
            return await ending

        return guarded if tracer is None else recorded


def _reading(handler: _Handler, admit: Admit) -> Any:
    """A handler of one message as a handler of a stream: gRPC leaves reading a stream to its handler."""
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
    """A serializer for handlers that may return an encoded message."""
    return lambda message: message if isinstance(message, bytes) else serializer(message)
