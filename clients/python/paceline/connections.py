"""The blocking client's connections to schedulers, and calls that are tried on one after the other."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

import grpc

from paceline import errors
from paceline.affinity import affinity_key
from paceline.channel import Link, Metadata, Security, open_channel
from paceline.endpoint import HEALTH_CHECK, SERVING, SchedulerEndpoint
from paceline.failover import Attempts, Rotation, addresses_of
from paceline.names import schedulers_behind
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceStub
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

Endpoint = SchedulerEndpoint[grpc.Channel, SchedulerServiceStub, AdminServiceStub]


def _endpoint(address: str, security: Security) -> Endpoint:
    channel = open_channel(address, Link.PUBLIC, security)
    return SchedulerEndpoint(address, channel, SchedulerServiceStub(channel), AdminServiceStub(channel))


class SchedulerConnections:
    """A channel to each of one or several schedulers. `failover_timeout_s`: of calls that generate."""

    def __init__(self, addresses: str | Sequence[str], security: Security, failover_timeout_s: float) -> None:
        self.addresses = addresses_of(addresses)
        self.failover_timeout_s = failover_timeout_s
        self.metadata = security.metadata
        self.endpoints = [_endpoint(address, security) for address in self.addresses]
        self.closed = threading.Event()
        self._rotation = Rotation(self.addresses)

    def close(self) -> None:
        """Close the channels; calls under way are cancelled."""
        self.closed.set()
        for endpoint in self.endpoints:
            endpoint.channel.close()

    def view(self, metadata: Metadata) -> Self:
        """The same channels, whose calls have other metadata. Closing one of them closes all."""
        view = copy.copy(self)
        view.metadata = metadata
        return view

    def affinity(self, request: pb.GenerateRequest, options: Mapping[str, Any]) -> bytes:
        """The request's key among several schedulers; b"" where there is one."""
        return affinity_key(request, options.get("affinity_key", "")) if len(self.addresses) > 1 else b""

    def attempts(self, timeout_s: float | None, failover_timeout_s: float, key: bytes = b"") -> Attempts:
        """The attempts of a call that begins now. `key`: of `affinity`."""
        now = time.monotonic()
        return Attempts(
            self._rotation,
            now,
            timeout_s=timeout_s,
            failover_timeout_s=failover_timeout_s,
            load_wait_s=self.failover_timeout_s,
            key=key,
        )

    def wait_s(self, attempts: Attempts, failure: errors.PacelineError) -> float:
        """Record a failed attempt; returns or raises as `Attempts.failed`: the seconds to wait."""
        refused = isinstance(failure, errors.RetryLater) and bool(failure.reason)
        schedulers = schedulers_behind(self.addresses[attempts.address_index]) if refused else 1
        return attempts.failed(failure, time.monotonic(), schedulers)

    def generate(
        self, attempts: Attempts, request: pb.GenerateRequest, timeout_s: float | None
    ) -> grpc._CallIterator[pb.GenerateResponse]:
        """Start the current attempt of a Generate call."""
        address = attempts.address_index
        call = self.endpoints[address].scheduler.Generate(
            request, timeout=timeout_s, metadata=(*self.metadata, *attempts.metadata)
        )
        self._rotation.began(address)
        if not call.add_callback(lambda: self._rotation.ended(address)):
            self._rotation.ended(address)  # the call has ended already
        return call

    def call(
        self,
        method: Callable[[Endpoint], grpc.UnaryUnaryMultiCallable[_Request, _Reply]],
        request: _Request,
        timeout_s: float | None,
        failover_timeout_s: float = 0.0,
        key: bytes = b"",
    ) -> _Reply:
        """Make a unary call, on one scheduler after the other until one takes it. Raises `paceline.errors`.

        `method` takes the call's method from an endpoint. `timeout_s` is the deadline of all attempts
        together; `failover_timeout_s` is the time in which a lost attempt is repeated; `key`: of `affinity`.
        """
        attempts = self.attempts(timeout_s, failover_timeout_s, key)
        while True:
            call, left_s = (
                method(self.endpoints[attempts.address_index]),
                attempts.timeout_s(time.monotonic()),
            )
            self._rotation.began(address := attempts.address_index)
            try:
                reply = call(request, timeout=left_s, metadata=(*self.metadata, *attempts.metadata))
            except grpc.RpcError as error:
                failure = errors.from_rpc(error)
            else:
                attempts.answered()
                return reply
            finally:
                self._rotation.ended(address)
            if self.closed.wait(self.wait_s(attempts, failure)):
                raise failure

    def is_serving(self, timeout_s: float | None) -> bool:
        """Whether a scheduler says by grpc.health.v1 that it serves. The calls send no metadata."""
        for endpoint in self.endpoints:
            check: grpc.UnaryUnaryMultiCallable[None, bytes] = endpoint.channel.unary_unary(
                HEALTH_CHECK,
                request_serializer=lambda _: b"",  # an empty HealthCheckRequest: the whole server
                response_deserializer=lambda reply: reply,
            )
            with suppress(grpc.RpcError):
                if check(None, timeout=timeout_s) == SERVING:
                    return True
        return False

    def call_all(
        self,
        method: Callable[[Endpoint], grpc.UnaryUnaryMultiCallable[_Request, _Reply]],
        request: _Request,
        timeout_s: float | None,
    ) -> list[_Reply]:
        """Make a unary call on all schedulers, one after the other. Raises the first `paceline.errors`.

        `timeout_s` is the deadline of each call.
        """
        replies = []
        for endpoint in self.endpoints:
            try:
                replies.append(method(endpoint)(request, timeout=timeout_s, metadata=self.metadata))
            except grpc.RpcError as error:
                raise errors.from_rpc(error) from None
        return replies
