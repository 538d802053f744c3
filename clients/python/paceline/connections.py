# Generated from aio/connections.py by .ci/blocking-clients: change that.
"""The blocking client's connections to schedulers, and calls that are tried on one after the other."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import grpc

from paceline import errors
from paceline.affinity import affinity_key
from paceline.calls import (
    Background,
    Endpoint,
    Flag,
    Replies,
    endpoint_at,
    in_thread,
    is_set_within,
    replies_of,
    reply_of,
)
from paceline.channel import Metadata, Security
from paceline.directory import LOOK_TIMEOUT_S, MAX_LOOK_BYTES, DirectoryUse, KnownSchedulers
from paceline.endpoint import HEALTH_CHECK, SERVING
from paceline.failover import Attempts, Rotation, addresses_of
from paceline.names import dns_name, schedulers_behind
from paceline.scheduler.v1 import scheduler_pb2 as pb

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class SchedulerConnections:
    """A channel to each of one or several schedulers. `failover_timeout_s`: of calls that generate."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        security: Security,
        failover_timeout_s: float,
        directory: DirectoryUse = "off",
    ) -> None:
        self.failover_timeout_s = failover_timeout_s
        self.metadata = security.metadata
        self._known = KnownSchedulers(addresses_of(addresses), security, directory)
        self.endpoints = {address: endpoint_at(address, security) for address in self._known.given}
        self.closed = Flag()  # one for all views
        self._rotation = Rotation(self._known.given)
        self._look = Background()

    def view(self, metadata: Metadata) -> Self:
        """The same channels, whose calls have other metadata. Closing one of them closes all."""
        view = copy.copy(self)
        view.metadata = metadata
        return view

    def close(self) -> None:
        """Close the channels; calls under way are cancelled."""
        self.closed.set()
        self._look.end()
        for endpoint in list(self.endpoints.values()):
            endpoint.channel.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """All that are used now: the given ones, then those learned from directories."""
        return self._known.addresses

    def affinity(self, request: pb.GenerateRequest, options: Mapping[str, Any]) -> bytes:
        """The request's key among several schedulers; b"" where there is one."""
        return affinity_key(request, options.get("affinity_key", "")) if len(self.addresses) > 1 else b""

    def attempts(
        self, call: str, timeout_s: float | None, failover_timeout_s: float, key: bytes = b""
    ) -> Attempts:
        """The attempts of a call that begins now, of the method `call`. `key`: of `affinity`."""
        now = time.monotonic()
        if self._known.is_time_to_look(now) and not self.closed.is_set():
            self._look.start(self._learn)
        return Attempts(
            self._rotation,
            now,
            timeout_s=timeout_s,
            failover_timeout_s=failover_timeout_s,
            load_wait_s=self.failover_timeout_s,
            key=key,
            call=call,
        )

    def is_what_it_says(self, address: str, message: pb.GenerateResponse) -> bool:
        """Whether a learned scheduler serves the model of its entry; if not, it is used no more."""
        if not message.HasField("started"):
            return True
        if self._known.is_what_it_says(address, message.started.model_fingerprint):
            return True
        self._known.distrust(address)
        self._use_known()
        return False

    def _endpoint(self, address: str) -> Endpoint:
        """The channel and stubs of an address, opened at its first use."""
        if (endpoint := self.endpoints.get(address)) is None:
            endpoint = self.endpoints[address] = endpoint_at(address, self._known.security(address))
        return endpoint

    def _learn(self) -> None:
        """Look into a directory, that of a given scheduler if one is up."""
        now = time.monotonic()
        order = self._rotation.order(now)
        teller = next((address for address in order if address in self._known.given), order[0])
        watch = self._endpoint(teller).scheduler.WatchSchedulers
        call = Replies(watch(pb.WatchSchedulersRequest(), timeout=LOOK_TIMEOUT_S, metadata=self.metadata))
        entries: list[pb.SchedulerEntry] = []
        size, complete = 0, False
        try:
            while not complete and size < MAX_LOOK_BYTES and (message := call.read()) is not None:
                entries.extend(message.entries)
                size, complete = size + message.ByteSize(), message.complete
        except errors.Unsupported:
            self._known.has_none(teller, now)
        except errors.PacelineError:
            self._known.lost(teller)
        finally:
            call.cancel()
        if complete:
            self._known.saw(teller, entries)
        self._use_known()

    def _use_known(self) -> None:
        """Use the schedulers that are known, and close the channels of others, when no call uses them."""
        known = self._known
        self._rotation.use(known.addresses, known.loads, known.draining)
        for address in self.endpoints.keys() - set(known.addresses):
            if self._rotation.is_idle(address):
                self.endpoints.pop(address).channel.close()

    def wait_s(self, attempts: Attempts, failure: errors.PacelineError) -> float:
        """Record a failed attempt; returns or raises as `Attempts.failed`: the seconds to wait."""
        address, schedulers = attempts.address, 1
        if isinstance(failure, errors.RetryLater) and failure.reason and dns_name(address) is not None:
            schedulers = in_thread(schedulers_behind, address)
        return attempts.failed(failure, time.monotonic(), schedulers)

    def generate(
        self, attempts: Attempts, request: pb.GenerateRequest, timeout_s: float | None
    ) -> Replies[pb.GenerateResponse]:
        """Start the current attempt of a Generate call."""
        address = attempts.address
        metadata = (*self.metadata, *attempts.metadata)
        method = self._endpoint(address).scheduler.Generate
        call = Replies(method(request, timeout=timeout_s, metadata=metadata))
        self._rotation.began(address)
        call.on_end(lambda: self._rotation.ended(address))
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
        name = type(request).__name__.removesuffix("Request")
        attempts = self.attempts(name, timeout_s, failover_timeout_s, key)
        while True:
            address, left_s = attempts.address, attempts.timeout_s(time.monotonic())
            call, metadata = method(self._endpoint(address)), (*self.metadata, *attempts.metadata)
            self._rotation.began(address)
            try:
                reply = reply_of(call, request, left_s, metadata)
            except errors.PacelineError as error:
                failure = error
            else:
                attempts.answered()
                return reply
            finally:
                self._rotation.ended(address)
            if is_set_within(self.closed, self.wait_s(attempts, failure)):
                raise failure

    def is_serving(self, timeout_s: float | None) -> bool:
        """Whether a scheduler says by grpc.health.v1 that it serves. The calls send no metadata."""
        checks: list[grpc.UnaryUnaryMultiCallable[None, bytes]] = [
            endpoint.channel.unary_unary(
                HEALTH_CHECK,
                request_serializer=lambda _: b"",  # an empty HealthCheckRequest: the whole server
                response_deserializer=lambda reply: reply,
            )
            for endpoint in list(self.endpoints.values())
        ]
        return SERVING in replies_of(checks, None, timeout_s)

    def call_each(
        self,
        method: Callable[[Endpoint], grpc.UnaryUnaryMultiCallable[_Request, _Reply]],
        request: _Request,
        timeout_s: float | None,
    ) -> list[_Reply]:
        """Make a unary call on all schedulers at once; the replies of those that answer.

        Raises the first `paceline.errors` if none does.
        """
        methods = [method(endpoint) for endpoint in list(self.endpoints.values())]
        outcomes = replies_of(methods, request, timeout_s, self.metadata)
        replies = [outcome for outcome in outcomes if not isinstance(outcome, errors.PacelineError)]
        for outcome in outcomes:
            if isinstance(outcome, errors.PacelineError) and not replies:
                raise outcome
        return replies

    def call_all(
        self,
        method: Callable[[Endpoint], grpc.UnaryUnaryMultiCallable[_Request, _Reply]],
        request: _Request,
        timeout_s: float | None,
    ) -> list[_Reply]:
        """Make a unary call on all schedulers, one after the other. Raises the first `paceline.errors`.

        `timeout_s` is the deadline of each call.
        """
        return [
            reply_of(method(endpoint), request, timeout_s, self.metadata)
            for endpoint in list(self.endpoints.values())
        ]
