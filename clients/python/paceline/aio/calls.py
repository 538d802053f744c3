"""How the asyncio clients call and wait. `paceline.calls` has the same names for the blocking clients.

These two modules are all that differs by hand: the blocking clients are generated from those of this package
(`.ci/blocking-clients`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar

import grpc
import grpc.aio

from paceline import errors
from paceline.channel import Link, Metadata, Security, open_aio_channel
from paceline.endpoint import SchedulerEndpoint
from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceStub
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

Flag = asyncio.Event
Endpoint: TypeAlias = "SchedulerEndpoint[grpc.aio.Channel, SchedulerServiceAsyncStub, AdminServiceAsyncStub]"


def endpoint_at(address: str, security: Security, credentials: grpc.ChannelCredentials | None) -> Endpoint:
    """A scheduler's channel and stubs. `credentials`: of `security`, so that no file is read here."""
    channel = open_aio_channel(address, Link.PUBLIC, security, credentials)
    return SchedulerEndpoint(address, channel, SchedulerServiceStub(channel), AdminServiceStub(channel))


async def reply_of(
    method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Reply],
    request: _Request,
    timeout_s: float | None,
    metadata: Metadata = (),
) -> _Reply:
    """Make a call; its reply. Raises `paceline.errors`."""
    return _parsed(await _outcome_of(method(request, timeout=timeout_s, metadata=metadata)))


async def replies_of(
    methods: Iterable[grpc.aio.UnaryUnaryMultiCallable[_Request, _Reply]],
    request: _Request,
    timeout_s: float | None,
    metadata: Metadata = (),
) -> list[_Reply | errors.PacelineError]:
    """Make the same call by several methods at once; the reply or the error of each."""

    async def ask(
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Reply],
    ) -> _Reply | errors.PacelineError:
        try:
            return await reply_of(method, request, timeout_s, metadata)
        except errors.PacelineError as error:
            return error

    return await asyncio.gather(*map(ask, methods))


class Replies(Generic[_Reply]):
    """The replies of a call that streams them."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, _Reply]) -> None:
        self._call = call

    async def read(self, limit_s: float | None = None) -> _Reply | None:
        """The next reply; None: the stream has ended. Raises `paceline.errors`.

        A reply that takes longer than `limit_s` cancels the call; None: no limit.
        """
        try:
            async with asyncio.timeout(limit_s):
                reply: _Reply | None = _message(await _outcome_of(self._call.read()))
        except TimeoutError:
            self._call.cancel()
            raise errors.Unavailable(f"no reply within {limit_s} s") from None
        return reply

    def cancel(self) -> None:
        """End the call; `read` ends or raises soon."""
        self._call.cancel()

    def on_end(self, react: Callable[[], None]) -> None:
        """Call `react` once, when the call has ended."""
        self._call.add_done_callback(lambda _: react())


class Exchange(Generic[_Request, _Reply]):
    """A call to an executor in which both sides stream."""

    def __init__(
        self,
        method: grpc.aio.StreamStreamMultiCallable[_Request, _Reply],
        timeout_s: float | None,
        metadata: Metadata,
    ) -> None:
        self._call = method(timeout=timeout_s, metadata=metadata)

    async def send(self, request: _Request) -> None:
        """Send a request. Returns when gRPC has taken it. Raises `paceline.errors`."""
        await self._guard(self._call.write(request))

    async def read(self) -> _Reply | None:
        """The next reply; None: the stream has ended. Raises `paceline.errors`."""
        reply: _Reply | None = _message(await self._guard(self._call.read()))
        return reply

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()

    async def _guard(self, operation: Awaitable[_T]) -> _T:
        """Await a read or a write; after the call's end it raises the error that ended the call."""
        try:
            return await _outcome_of(operation)
        except asyncio.InvalidStateError:  # what grpc.aio raises for a write after the call's end
            call = self._call
            code, message, trailers = await call.code(), await call.details(), await call.trailing_metadata()
            if code is grpc.StatusCode.OK:
                raise errors.Unavailable("the executor ended the stream") from None
            raise errors.from_status(code, message or "", trailers) from None


class Background:
    """Work beside the calls, one at a time."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Begin the work, unless the last one has not ended."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(work(), name="paceline directory")

    async def wait(self, limit_s: float) -> None:
        """Wait until the work has ended, for at most `limit_s`."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=limit_s)

    async def end(self) -> None:
        """Cancel it, and wait until it has ended. Raises nothing of it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


def require_open(closed: Flag) -> None:
    """Raises RuntimeError for a call that begins after its client was closed."""
    if closed.is_set():
        raise RuntimeError("the client is closed")


async def is_set_within(flag: Flag, seconds: float) -> bool:
    """Wait until the flag is set, for at most `seconds`; returns whether it is."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await flag.wait()
    return flag.is_set()


async def in_thread(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """The result of a function that blocks."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def shielded(operation: Awaitable[_T]) -> _T:
    """The operation's result. It goes on where the task that awaits it is cancelled."""
    return await asyncio.shield(operation)


async def _outcome_of(operation: Awaitable[_T]) -> _T:
    """The operation's result. Raises `paceline.errors`.

    When a call was cancelled or its channel was closed, grpc.aio raises CancelledError in the task that
    awaits it. This raises Unavailable instead, unless the task itself is being cancelled.
    """
    try:
        return await operation
    except grpc.RpcError as error:
        raise errors.from_rpc(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise errors.Unavailable("the connection was closed") from None


def _message(read: Any) -> Any:
    """What was read from a stream; None at its end."""
    return None if read is grpc.aio.EOF else _parsed(read)


def _parsed(reply: _T) -> _T:
    """The reply. Raises InternalError for None, which grpc.aio returns for one that can't be parsed."""
    if reply is None:
        raise errors.InternalError("the reply can't be parsed: its bytes are no message of this RPC's type")
    return reply
