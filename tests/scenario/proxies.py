"""Schedulers that behave as real ones seldom do: proxies in front of a real one, which serve Generate."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from paceline.channel import Link, open_channel, server_options
from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.support.untyped import raw


class Proxy(grpc.GenericRpcHandler):
    """Passes streams on as `altered` has them."""

    def __init__(self, scheduler: grpc.Channel) -> None:
        self.address = ""
        self._scheduler = raw(scheduler)

    @abstractmethod
    def altered(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """What the client gets of a stream."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method: str = handler_call_details.method
        if not method.endswith("/Generate"):
            return None

        def generate(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            self.saw(pb.GenerateRequest.FromString(request))
            call = self._scheduler.unary_stream(method)(request)
            context.add_callback(call.cancel)
            try:
                yield from self.altered(call, context)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details() or "")
            finally:
                call.cancel()

        return grpc.unary_stream_rpc_method_handler(generate)

    def saw(self, request: pb.GenerateRequest) -> None:
        """Called with each request."""


class Cutting(Proxy):
    """Breaks each stream after one to four messages. `continuations` counts the streams it went on with."""

    def __init__(self, scheduler: grpc.Channel) -> None:
        super().__init__(scheduler)
        self.continuations = 0
        self._cuts = itertools.cycle((1, 4, 3))

    def saw(self, request: pb.GenerateRequest) -> None:
        self.continuations += request.HasField("continuation")

    def altered(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from itertools.islice(messages, next(self._cuts))
        if next(messages, None) is not None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


class Stalling(Proxy):
    """Sends three messages, and then nothing, on a connection that stays in order."""

    def altered(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from itertools.islice(messages, 3)
        left = threading.Event()
        if context.add_callback(left.set):
            left.wait()


class Newer(Proxy):
    """Speaks a later revision: messages have fields, and streams have events, that clients don't know."""

    def altered(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            event = pb.GenerateResponse.FromString(message)
            kind = event.WhichOneof("event")
            if kind is not None:
                getattr(event, kind).MergeFromString(_UNKNOWN_FIELDS)
            event.MergeFromString(_UNKNOWN_FIELDS)
            yield _UNKNOWN_FIELDS
            yield event.SerializeToString()


_UNKNOWN_FIELDS = b"\xc0\x3e\x07" + b"\xca\x3e\x05later"
"""Fields 1000 (a varint) and 1001 (bytes), which no message of the contract has."""

ProxyT = TypeVar("ProxyT", bound=Proxy)


@contextmanager
def serving(kind: Callable[[grpc.Channel], ProxyT], scheduler: str) -> Iterator[ProxyT]:
    """A proxy, serving, of the scheduler at this address."""
    with open_channel(scheduler, Link.PUBLIC) as channel:
        proxy = kind(channel)
        server = grpc.server(ThreadPoolExecutor(8), [proxy], options=server_options(Link.PUBLIC))
        proxy.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield proxy
        finally:
            server.stop(None).wait()
