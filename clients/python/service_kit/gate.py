"""The server interceptor that authenticates calls, and bounds their headers, before their request is read.

gRPC reads the request for the handler that the interceptor returns: all of it for a unary handler; for a
stream handler nothing, until the handler asks. So all handlers that leave here are stream handlers, also for
unary methods: a refusal reads no request, and whose call it is is known before its message has come. Clients
can't tell the difference.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from paceline.malformed import Malformed, lenient

from service_kit.audit import Audit
from service_kit.connections import Connections
from service_kit.credentials import Credentials
from service_kit.logs import Log
from service_kit.status import client_has_left, end_call, rich_status

log = Log(__name__)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_UNKNOWN_WATCHES = 256
"""Open health watches of all callers without a valid token together. Further ones are refused."""

MAX_METADATA_BYTES = 16 << 10
"""Of a call, with 32 for each entry, as HTTP/2 counts them. gRPC refuses more by itself, but only once the
caller has confirmed the server's settings."""
_IMPOSSIBLE_BYTES = 4 * MAX_METADATA_BYTES
"""What no honest caller sends, not even before it knows the settings."""
_ENTRY_BYTES = 32
UNCOLLECTED_BYTES = 1 << 20
"""Metadata of calls for which the garbage collector runs, however few objects there are."""

_OURS = "/paceline."
_CHECK, _WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


_REFUSED = (
    grpc.StatusCode.UNAUTHENTICATED,
    "authorization: the token is missing or wrong",
    "UNAUTHENTICATED",
)
_UNKNOWN = grpc.StatusCode.UNIMPLEMENTED, "unknown method", "UNSUPPORTED"
_TOO_LARGE = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    f"the call's metadata has more than {MAX_METADATA_BYTES} bytes",
    "QUOTA",
)
_TOO_MANY = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    f"{MAX_UNKNOWN_WATCHES} health watches without a token are open",
    "QUOTA",
)


class Gate(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token. It must be the first of a server's interceptors.

    Check and Watch of grpc.health.v1 need no token. Callers without a valid one get the status of the whole
    server, whatever service their request names, because the request is not read.

    It tells `connections` which peers made a call with valid credentials, and which sent impossible headers.
    """

    def __init__(
        self, credentials: Credentials, audit: Audit, connections: Connections | None = None
    ) -> None:
        self._credentials, self._audit = credentials, audit
        self._connections = connections or Connections()
        self._watches = self._uncollected_bytes = 0
        self._admitted: dict[str, tuple[_Handler, _Handler]] = {}  # by method: as found, and as returned

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The handler of one call: the method's own, or one that refuses the call."""
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        size = _size(metadata)
        self._collect(size)
        if size > MAX_METADATA_BYTES:
            return self._answering(method, *_TOO_LARGE, accused=size > _IMPOSSIBLE_BYTES)
        if not self._credentials.admits(metadata):
            if method not in (_CHECK, _WATCH):
                return self._answering(method, *_REFUSED)
            handler = await continuation(handler_call_details)
            return self._answering(method, *_UNKNOWN) if handler is None else self._unread(method, handler)
        handler = await continuation(handler_call_details)
        if handler is None:
            return self._answering(method, *_UNKNOWN)
        found, admitting = self._admitted.get(method, (None, handler))
        if found is not handler:
            admitting = self._admitting(handler if method.startswith(_OURS) else _guarded(handler))
            self._admitted[method] = handler, admitting
        return admitting

    def _collect(self, metadata_bytes: int) -> None:
        """Free the metadata of calls: grpc.aio leaves each call's in a cycle of references."""
        self._uncollected_bytes += metadata_bytes
        if metadata_bytes > _IMPOSSIBLE_BYTES or self._uncollected_bytes > UNCOLLECTED_BYTES:
            self._uncollected_bytes = 0
            asyncio.get_running_loop().call_soon(gc.collect, 0)  # when this call's cycle is complete

    def _admitting(self, handler: _Handler) -> _Handler:
        """The handler as one that reads its request itself, and first says that its peer is no stranger."""
        behaviour: Any = handler.unary_unary or handler.unary_stream
        reads = behaviour is not None
        behaviour = behaviour or handler.stream_unary or handler.stream_stream
        if not inspect.iscoroutinefunction(behaviour):
            return handler

        async def call(request: Any, context: _Context) -> None:
            self._connections.admit(context.peer())
            try:
                if reads and (request := await context.read()) is grpc.aio.EOF:
                    request = Malformed()
                if (answer := await behaviour(request, context)) is not None:
                    await context.write(answer)
            except BaseException as error:
                del request, context  # see end_call
                if client_has_left(error):
                    raise asyncio.CancelledError from None
                raise

        parse, serialize = handler.request_deserializer, handler.response_serializer
        return grpc.stream_stream_rpc_method_handler(call, parse, serialize)

    def _answering(
        self, method: str, code: grpc.StatusCode, message: str, reason: str, *, accused: bool = False
    ) -> _Handler:
        """A handler that ends the call with this status without reading the request."""

        async def answer(_requests: object, context: _Context) -> None:
            if accused:
                self._connections.accuse(context.peer())
            self._audit.failed(self._credentials.identify(context).name, method, code, reason)
            ending = end_call(context, rich_status(code, message, reason=reason))
            del _requests, context  # see end_call
            await ending

        return grpc.stream_stream_rpc_method_handler(answer)

    def _unread(self, method: str, handler: _Handler) -> _Handler:
        """The health handler, called with an empty request instead of the caller's."""
        if handler.response_streaming and self._watches >= MAX_UNKNOWN_WATCHES:
            return self._answering(method, *_TOO_MANY)
        empty, serializer = health_pb2.HealthCheckRequest(), handler.response_serializer
        behaviour: Any = handler.unary_stream or handler.unary_unary

        async def check(_requests: object, context: _Context) -> None:
            self._connections.answer(context.peer())
            await context.write(await behaviour(empty, context))

        async def watch(_requests: object, context: _Context) -> None:
            self._watches += 1
            self._connections.answer(context.peer())
            try:
                await behaviour(empty, context)
            finally:
                self._watches -= 1

        answer = watch if handler.response_streaming else check
        return grpc.stream_stream_rpc_method_handler(answer, None, serializer)


def _size(metadata: Sequence[tuple[str, str | bytes]] | None) -> int:
    """Bytes of a call's metadata; a lower bound if it has impossibly many entries."""
    if metadata is None:
        return 0
    if len(metadata) * _ENTRY_BYTES > _IMPOSSIBLE_BYTES:
        return len(metadata) * _ENTRY_BYTES
    return sum(len(key) + len(value) + _ENTRY_BYTES for key, value in metadata)


def _guarded(handler: _Handler) -> _Handler:
    """A handler of a library (health, reflection) whose exceptions do not reach the client as text."""
    parse, serialize = lenient(handler.request_deserializer), handler.response_serializer
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(_calling(handler.unary_unary), parse, serialize)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(_calling(handler.unary_stream), parse, serialize)
    if handler.stream_stream:
        return grpc.stream_stream_rpc_method_handler(_calling(handler.stream_stream), parse, serialize)
    return handler


def _calling(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """`behaviour` with every exception mapped to a status: INVALID_ARGUMENT if unparsable, else INTERNAL."""

    async def call(request: Any, context: _Context) -> Any:
        try:
            given = _parsed_stream(request) if hasattr(request, "__aiter__") else _parsed(request)
            answer = behaviour(given, context)
            if not hasattr(answer, "__aiter__"):
                return await answer
            async for response in answer:
                await context.write(response)
        except _Unparsable:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"request: {Malformed.message}")
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if client_has_left(error):
                raise asyncio.CancelledError from None
            if not context.cancelled() and not context.done():
                log.error("a handler failed", error)
                await context.abort(grpc.StatusCode.INTERNAL, "internal error; the service's log has more")

    return call


class _Unparsable(Exception):
    """The request is Malformed."""


def _parsed(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise _Unparsable
    return request


async def _parsed_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _parsed(request)
