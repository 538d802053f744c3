"""How the blocking clients call and wait. `paceline.aio.calls` has the same names for the asyncio clients.

The modules of the blocking clients are generated from those of `paceline.aio` (`.ci/blocking-clients`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, ParamSpec, TypeVar

import grpc

from paceline import errors
from paceline.channel import Link, Metadata, Security, open_channel
from paceline.endpoint import SchedulerEndpoint
from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceStub
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

Flag = threading.Event
Endpoint = SchedulerEndpoint[grpc.Channel, SchedulerServiceStub, AdminServiceStub]


def endpoint_at(address: str, security: Security, credentials: grpc.ChannelCredentials | None) -> Endpoint:
    """A scheduler's channel and stubs. `credentials`: of `security`, so that no file is read here."""
    channel = open_channel(address, Link.PUBLIC, security, credentials)
    return SchedulerEndpoint(address, channel, SchedulerServiceStub(channel), AdminServiceStub(channel))


def reply_of(
    method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
    request: _Request,
    timeout_s: float | None,
    metadata: Metadata = (),
) -> _Reply:
    """Make a call; its reply. Raises `paceline.errors`."""
    try:
        return method(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        raise errors.from_rpc(error) from None


def replies_of(
    methods: Iterable[grpc.UnaryUnaryMultiCallable[_Request, _Reply]],
    request: _Request,
    timeout_s: float | None,
    metadata: Metadata = (),
) -> list[_Reply | errors.PacelineError]:
    """Make the same call by several methods at once; the reply or the error of each."""
    replies: list[_Reply | errors.PacelineError] = []
    for call in [method.future(request, timeout=timeout_s, metadata=metadata) for method in methods]:
        try:
            replies.append(call.result())
        except grpc.RpcError as error:
            replies.append(errors.from_rpc(error))
    return replies


class Replies(Generic[_Reply]):
    """The replies of a call that streams them."""

    def __init__(self, call: grpc._CallIterator[_Reply]) -> None:
        self._call = call

    def read(self, limit_s: float | None = None) -> _Reply | None:
        """The next reply; None: the stream has ended. Raises `paceline.errors`.

        A reply that takes longer than `limit_s` cancels the call; None: no limit.
        """
        limit = None
        if limit_s is not None and self._call.is_active():
            limit = threading.Timer(limit_s, self._call.cancel)
            limit.daemon = True
            limit.start()
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            raise errors.from_rpc(error) from None
        finally:
            if limit is not None:
                limit.cancel()

    def cancel(self) -> None:
        """End the call; `read` ends or raises soon. From any thread."""
        self._call.cancel()

    def on_end(self, react: Callable[[], None]) -> None:
        """Call `react` once, when the call has ended."""
        if not self._call.add_callback(react):
            react()  # it has ended already


class Exchange(Generic[_Request, _Reply]):
    """A call to an executor in which both sides stream."""

    def __init__(
        self,
        method: grpc.StreamStreamMultiCallable[_Request, _Reply],
        timeout_s: float | None,
        metadata: Metadata,
    ) -> None:
        self._outbox: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._call = method(iter(self._outbox.get, None), timeout=timeout_s, metadata=metadata)

    def send(self, request: _Request) -> None:
        """Queue a request for sending. If the stream is lost, `read` raises the error."""
        self._outbox.put(request)

    def read(self) -> _Reply | None:
        """The next reply; None: the stream has ended. Raises `paceline.errors`."""
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            raise errors.from_rpc(error) from None

    def cancel(self) -> None:
        """End the call."""
        self._outbox.put(None)
        self._call.cancel()


class Background:
    """Work beside the calls, one at a time, in a thread that ends with it, or with the process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin the work, unless the last one has not ended. The work of a process before a fork has."""

        def run() -> None:
            with suppress(ValueError):  # gRPC's for a call on a channel that was closed meanwhile
                work()

        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=run, name="paceline directory", daemon=True)
            self._thread.start()

    def wait(self, limit_s: float) -> None:
        """Wait until the work has ended, for at most `limit_s`."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def end(self) -> None:
        """Leave it: its call ends with its channel."""


def require_open(closed: Flag) -> None:
    """Raises RuntimeError for a call that begins after its client was closed."""
    if closed.is_set():
        raise RuntimeError("the client is closed")


def is_set_within(flag: Flag, seconds: float) -> bool:
    """Wait until the flag is set, for at most `seconds`; returns whether it is."""
    return flag.wait(seconds)


def in_thread(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """The result of a function that blocks: here in the caller's thread."""
    return function(*args, **kwargs)


def shielded(result: _T) -> _T:
    """The result of an operation, which nothing can interrupt here."""
    return result
