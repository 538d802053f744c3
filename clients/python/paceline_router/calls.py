"""Calls on their way: to the scheduler of the model that they name, and back as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Set
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from paceline.channel import Link, open_aio_channel
from paceline.failover import MODEL_KEY, WAIT_KEY
from paceline.scheduler.v1 import admin_pb2, scheduler_pb2
from service_kit.credentials import Credentials
from service_kit.logs import Log
from service_kit.status import client_has_left, end_call, rich_status

from paceline_router.live_calls import MAX_CALLS, LiveCalls, TooManyCallsError
from paceline_router.models import ModelState, RoutedModel, UnknownModelError
from paceline_router.supervisor_connection import SupervisorConnection

log = Log(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Own: TypeAlias = Callable[[Any, _Context], Awaitable[None]]
"""Answers a call here: it gets the request, and writes messages."""
Refused: TypeAlias = Callable[[_Context, str, grpc.StatusCode, str], None]
"""Called with each call that is refused here, its method's path, and the code and reason."""

MAX_WAIT_S = 3600.0
_RETRY_S = 1.0
_DROPPED = (MODEL_KEY, "user-agent", "te", "content-type", "grpc-timeout", "grpc-encoding")
_Code = grpc.StatusCode


class CallEnd(grpc.Status):
    """A status as another server has sent it, details included."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> None:
        self.code, self.details, self.trailing_metadata = code, details, trailing_metadata


class RoutedCalls(grpc.GenericRpcHandler):
    """Handles all methods of a scheduler. `own`: by path, those that are answered here."""

    def __init__(
        self,
        supervisor: SupervisorConnection,
        credentials: Credentials,
        own: Mapping[str, Own],
        refused: Refused,
    ) -> None:
        self.live = LiveCalls()
        self._supervisor, self._credentials, self._own = supervisor, credentials, own
        self._refused = refused
        self._request_types = dict(_methods(scheduler_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR))
        self._connections: dict[str, list[_Connection]] = {}  # by socket

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Handler | None:
        """The handler of a method, which passes its calls on; None: there is no such one."""
        method = handler_call_details.method
        if (request_type := self._request_types.get(method)) is None:
            return None

        async def handle(_unread: object, context: _Context) -> None:
            try:
                await self._handle(method, request_type, context)
                return
            except CallEndError as error:
                end = error
            except UnknownModelError as error:
                end = refusal(str(error), "MODEL_NOT_FOUND", _Code.NOT_FOUND, field="model")
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                if client_has_left(error) or context.cancelled() or context.done():
                    raise asyncio.CancelledError from None
                log.error("a call could not be passed on", error, method=method)
                end = refusal("internal error; the router's log has more", "INTERNAL", _Code.INTERNAL)
            if end.reason:
                self._refused(context, method, end.status.code, end.reason)
            ending = end_call(context, end.status)
            del _unread, context, end  # see end_call
            await ending

        return grpc.stream_stream_rpc_method_handler(handle)

    async def close(self) -> None:
        """Close the connections to schedulers."""
        for connections in self._connections.values():
            for one in connections:
                await one.channel.close()

    def keep(self, sockets: Set[str]) -> None:
        """Forget all other schedulers, which have ended; their connections close with their last calls."""
        self._connections = {one: found for one, found in self._connections.items() if one in sockets}

    async def all(self, method: str, data: bytes, context: _Context) -> list[bytes]:
        """A unary call of all schedulers that run, at once; the answers of those that answer."""
        asked = [
            self._answers(model, method, data, context) for model in self._supervisor.models if model.socket
        ]
        return [answer for answers in await asyncio.gather(*asked) for answer in answers]

    async def _answers(self, model: RoutedModel, method: str, data: bytes, context: _Context) -> list[bytes]:
        """One scheduler's answer to a unary call; none of one that has just died: it has no live requests."""
        try:
            async with self._called(model, method, data, context) as call:
                return [message async for message in call]
        except CallEndError as error:
            if error.status.code is not _Code.UNAVAILABLE:
                raise
            return []

    async def _handle(self, method: str, kind: type[Message], context: _Context) -> None:
        """Answer a call here or by its model's scheduler. Raises CallEndError, UnknownModelError."""
        data = await context.read()
        if data is grpc.aio.EOF:
            text = "request: is missing"
            raise refusal(text, "INVALID_REQUEST", _Code.INVALID_ARGUMENT, field="request")
        with suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_S):
                await self._supervisor.known()
        if not self._supervisor.models.version:
            raise try_again("the models are not known yet", "NOT_READY")
        field = ""
        try:
            request = kind.FromString(data)
        except DecodeError:  # the scheduler says so
            request = kind()
        else:
            if (own := self._own.get(method)) is not None:
                await own(request, context)
                return
            field = _named(request)
        metadata = dict(context.invocation_metadata() or ())
        model = self._supervisor.models.meant(field, _text(metadata.get(MODEL_KEY, "")))
        del request
        uses = names_model(kind)
        with self._counted(model, context):
            if uses:
                model = await self._loaded(model, metadata, context)
            elif not model.socket:
                raise _not_serving(model)
            with self._supervisor.using("busy", model.name) if uses else nullcontext():
                async with self._called(model, method, data, context) as call:
                    if (message := await call.read()) is not grpc.aio.EOF:
                        await context.send_initial_metadata(_passed(await call.initial_metadata()))
                    while message is not grpc.aio.EOF:
                        await context.write(message)
                        message = await call.read()

    async def up(self, name: str, context: _Context) -> None:
        """Have a model loaded, and wait until it serves. Raises CallEndError."""
        model = self._supervisor.models[name]
        with self._counted(model, context):
            await self._loaded(model, {}, context)

    @contextmanager
    def _counted(self, model: RoutedModel, context: _Context) -> Iterator[None]:
        """A context manager: counts a live call. Raises CallEndError if the caller can't have one more."""
        if self._supervisor.closing:
            raise try_again("shutting down", "DRAINING")
        with ExitStack() as counting:
            try:
                counting.enter_context(self.live.counted(model.name, self._credentials.identify(context)))
            except TooManyCallsError as error:
                raise try_again(str(error), "QUEUE_FULL", _Code.RESOURCE_EXHAUSTED) from None
            yield

    async def _loaded(
        self, model: RoutedModel, metadata: Mapping[str, Any], context: _Context
    ) -> RoutedModel:
        """The model once it serves. It is loaded for this call, which waits as its metadata or deadline says.

        Raises CallEndError.
        """
        wanted = metadata.get(WAIT_KEY)
        wait_s = MAX_WAIT_S if wanted is None else _wanted_s(_text(wanted))
        if (left_s := context.time_remaining()) is not None:
            wait_s = min(wait_s, left_s - 0.25)
        if model.may_serve_later and wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._supervisor.served(model.name)
        model = self._supervisor.models[model.name]
        if model.state is not ModelState.SERVING:
            raise _not_serving(model)
        return model

    @asynccontextmanager
    async def _called(
        self, model: RoutedModel, method: str, data: bytes, context: _Context
    ) -> AsyncIterator[grpc.aio.UnaryStreamCall[bytes, bytes]]:
        """A context manager: a call of a scheduler. Raises CallEndError if it fails within the block."""
        connection = self._connection(model.socket)
        send: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = connection.channel.unary_stream(method)
        call = send(
            data, timeout=context.time_remaining(), metadata=_passed(context.invocation_metadata() or ())
        )
        connection.calls += 1
        try:
            yield call
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
            if code is _Code.CANCELLED:  # which is only ever the client's own doing
                code, details = _Code.UNAVAILABLE, f"the scheduler has ended the call: {details}"
            raise CallEndError(CallEnd(code, details, _passed(error.trailing_metadata() or ()))) from None
        finally:
            connection.calls -= 1
            call.cancel()

    def _connection(self, socket: str) -> _Connection:
        """One that a scheduler takes another call on: calls beyond its bound would wait in gRPC."""
        connections = self._connections.setdefault(socket, [])
        for one in connections:
            if one.calls < MAX_CALLS:
                return one
        connections.append(_Connection(open_aio_channel(f"unix:{socket}", Link.PRIVATE)))
        return connections[-1]


@dataclass(slots=True, eq=False)
class _Connection:
    """To a scheduler, which bounds the calls of each."""

    channel: grpc.aio.Channel
    calls: int = 0


class CallEndError(Exception):
    """Ends a call with a status. `reason`: why it is refused here; "": a scheduler has ended it."""

    def __init__(self, status: grpc.Status, reason: str = "") -> None:
        super().__init__(status.details)
        self.status, self.reason = status, reason


def try_again(text: str, reason: str, code: grpc.StatusCode = _Code.UNAVAILABLE) -> CallEndError:
    """What ends a call that may succeed in a second."""
    return refusal(text, reason, code, retry_after_s=_RETRY_S)


def refusal(text: str, reason: str, code: grpc.StatusCode, **details: Any) -> CallEndError:
    """What ends a call here. `details`: of `rich_status`."""
    return CallEndError(rich_status(code, text, reason=reason, **details), reason)


def _not_serving(model: RoutedModel) -> CallEndError:
    detail = f", {model.detail}" if model.detail else ""
    return try_again(f"model {model.name}: {model.state.value}{detail}", "NOT_READY")


def _methods(*contracts: FileDescriptor) -> Iterator[tuple[str, type[Message]]]:
    """The methods by their paths, with the types of their requests."""
    for contract in contracts:
        for service in contract.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type)


def names_model(kind: type[Message]) -> bool:
    """Whether requests of this kind have a field for the model. They load it, and others do not."""
    return not {"model", "request"}.isdisjoint(kind.DESCRIPTOR.fields_by_name)


def _named(request: Any) -> str:
    """The field `model` of a request, or of the request within it; "" without one."""
    return str(getattr(getattr(request, "request", request), "model", ""))


def _passed(metadata: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((key, value) for key, value in metadata if key not in _DROPPED)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _wanted_s(milliseconds: str) -> float:
    """How long a caller waits at most for a load, as the scheduler's LoadWait reads it."""
    valid = len(milliseconds) <= 9 and milliseconds.isascii() and milliseconds.isdigit()
    return min(int(milliseconds) / 1000, MAX_WAIT_S) if valid else 0.0
