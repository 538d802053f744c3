# Generated from aio/connections.py by .ci/blocking-clients: change that.
"""The blocking client's connections to schedulers, and calls that are tried on one after the other."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import grpc

from paceline import errors
from paceline.affinity import affinity_key
from paceline.call_spans import NO_SPAN, CallSpan, call_span
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
    require_open,
)
from paceline.channel import Metadata, Security
from paceline.directory import (
    LOOK_TIMEOUT_S,
    MAX_ENTRIES,
    MAX_LOOK_BYTES,
    MESSAGE_BYTES,
    OTHER_MODEL,
    DirectoryUse,
    KnownSchedulers,
)
from paceline.endpoint import HEALTH_CHECK, SERVING
from paceline.failover import MODEL_KEY, Attempts, Rotation, addresses_of
from paceline.names import dns_name, schedulers_behind
from paceline.scheduler.v1 import scheduler_pb2 as pb

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
_Part = TypeVar("_Part")


class SchedulerConnections:
    """A channel to each of one or several schedulers. `failover_timeout_s`: of calls that generate."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        security: Security,
        failover_timeout_s: float,
        directory: DirectoryUse = "off",
        model: str = "",
        extra_streams: int = 0,
    ) -> None:
        self.failover_timeout_s = failover_timeout_s
        self.model = model  # that calls mean which name none
        self.metadata = self._with_model(security.metadata)
        self._known = KnownSchedulers(addresses_of(addresses), security, directory)
        self._credentials = security.credentials()  # of all channels: no file is read in a call
        self._opening = threading.Lock()  # no channel is closed between its choice and the count of its call
        self.endpoints: dict[str, Endpoint] = {}
        self.closed = Flag()  # one for all views
        self._rotation = Rotation(self._known.given, extra_streams)
        for address in self._known.given:
            self._endpoint(address)
        self._look = Background()

    def view(self, metadata: Metadata) -> Self:
        """The same channels, whose calls have other metadata. Closing one of them closes all."""
        view = copy.copy(self)
        view.metadata = self._with_model(metadata)
        return view

    def named(self, request: _Request) -> _Request:
        """The request, which names the client's model if it has a field for that and names none."""
        if self.model and getattr(asked := getattr(request, "request", request), "model", None) == "":
            asked.model = self.model  # type: ignore[union-attr]
        return request

    def _with_model(self, metadata: Metadata) -> Metadata:
        """Metadata that names the client's model, for requests without such a field, unless it names one."""
        named = not self.model or any(key == MODEL_KEY for key, _ in metadata)
        return metadata if named else (*metadata, (MODEL_KEY, self.model))

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
        self,
        call: str,
        timeout_s: float | None,
        failover_timeout_s: float,
        key: bytes = b"",
        model: str = "",
        span: CallSpan = NO_SPAN,
    ) -> Attempts:
        """The attempts of a call that begins now, of the method `call`.

        `key`: of `affinity`. `model`: what the request names. `span`: of all attempts together.
        """
        now = time.monotonic()
        self._look_in_time(now)
        return Attempts(
            self._rotation,
            now,
            timeout_s=timeout_s,
            failover_timeout_s=failover_timeout_s,
            load_wait_s=self.failover_timeout_s,
            key=key,
            model=model,
            call=call,
            span=span,
        )

    def check_started(self, address: str, message: pb.GenerateResponse) -> None:
        """Raises Unavailable if it says that a learned scheduler serves another model than its entry says.

        Called with each message of a stream: a client that begins no calls meanwhile looks too.
        """
        self._look_in_time(time.monotonic())
        if message.HasField("started"):
            self._check_model(address, message.started.model_fingerprint)

    def _check_model(self, address: str, model_fingerprint: bytes) -> None:
        if not self._known.is_what_it_says(address, model_fingerprint):
            self._known.distrust(address)
            self._use_known()
            raise errors.Unavailable(f"{address} is not what a directory says of it", reason=OTHER_MODEL)

    def _endpoint(self, address: str) -> Endpoint | None:
        """The channel and stubs of an address, opened at its first use; None: it is known no more."""
        if (security := self._known.security(address)) is None:
            return None
        if (endpoint := self.endpoints.get(address)) is None:
            endpoint = self.endpoints[address] = endpoint_at(address, security, self._credentials)
        return endpoint

    def _begin(self, attempts: Attempts) -> Endpoint:
        """Count the current attempt at its scheduler, which is still known."""
        require_open(self.closed)
        with self._opening:
            while (endpoint := self._endpoint(attempts.address)) is None:
                self._choose_among_known()  # or it may be chosen again
                attempts.skip(time.monotonic())
            self._rotation.began(attempts.address)
        return endpoint

    @contextmanager
    def _at(self, addresses: Sequence[str]) -> Iterator[list[Endpoint]]:
        """The endpoints of addresses, with a call counted at each."""
        require_open(self.closed)
        with self._opening:
            endpoints = [one for address in addresses if (one := self._endpoint(address)) is not None]
            for one in endpoints:
                self._rotation.began(one.address)
        try:
            yield endpoints
        finally:
            for one in endpoints:
                self._rotation.ended(one.address)

    def _look_in_time(self, now: float) -> None:
        """Look into a directory beside the calls, if it is time."""
        if self._known.is_time_to_look(now, self.metadata) and not self.closed.is_set():
            self._look.start(self._learn)

    def _look_first(self, timeout_s: float | None) -> float | None:
        """Look before a call to all, if none has; what is left of `timeout_s`, at least half of it."""
        began = time.monotonic()
        self._look_in_time(began)
        if self._known.has_looked:
            return timeout_s
        self._look.wait(LOOK_TIMEOUT_S if timeout_s is None else min(LOOK_TIMEOUT_S, timeout_s / 2))
        return None if timeout_s is None else max(timeout_s / 2, timeout_s - (time.monotonic() - began))

    def _learn(self) -> None:
        """Look into the directory of one scheduler."""
        now = time.monotonic()
        teller = self._known.teller(now, self._rotation.is_down)
        with self._opening:
            endpoint = self._endpoint(teller)
        if endpoint is None:
            return
        try:
            entries, complete = self._listed(endpoint, LOOK_TIMEOUT_S)
        except errors.Unsupported:
            self._known.has_none(teller, now)
        except (errors.Unavailable, errors.DeadlineExceeded):
            self._known.lost(teller, now)
            self._rotation.down(teller, time.monotonic())
        except errors.PacelineError:
            self._known.refused(self.metadata, now)
        else:
            self._known.saw(teller, entries if complete else (), now)
        self._use_known()

    def _listed(self, endpoint: Endpoint, timeout_s: float | None) -> tuple[list[pb.SchedulerEntry], bool]:
        """The entries of a scheduler's directory, and whether these are all."""
        watch = endpoint.scheduler.WatchSchedulers
        call = Replies(watch(pb.WatchSchedulersRequest(), timeout=timeout_s, metadata=self.metadata))
        entries: list[pb.SchedulerEntry] = []
        size, complete = 0, False
        try:
            while not complete and size < MAX_LOOK_BYTES and (message := call.read()) is not None:
                entries.extend(message.entries)
                size, complete = size + MESSAGE_BYTES + message.ByteSize(), message.complete
        finally:
            call.cancel()
        return entries, complete

    def entries(self, timeout_s: float | None) -> list[pb.SchedulerEntry]:
        """What the directory of a given scheduler lists; nothing if it has none. Raises `paceline.errors`."""
        with self._at(self._known.given[:1]) as endpoints:
            try:
                entries, _ = self._listed(endpoints[0], timeout_s)
            except errors.Unsupported:
                return []
        return entries[:MAX_ENTRIES]

    def _use_known(self) -> None:
        """Use the schedulers that are known, and close the channels of others, when no call uses them."""
        with self._opening:
            self._choose_among_known()
            unused = [
                self.endpoints.pop(address)
                for address in self.endpoints.keys() - set(self._known.addresses)
                if self._rotation.is_idle(address)
            ]
        for endpoint in unused:
            endpoint.channel.close()

    def _choose_among_known(self) -> None:
        """Let attempts go to those that are known now."""
        known = self._known
        now = known.addresses, known.loads, known.draining, known.adapters, known.models, known.foreign
        self._rotation.use(*now)

    def failed(self, attempts: Attempts, failure: errors.PacelineError) -> float:
        """Record a failed attempt and choose the next; returns or raises as `Attempts.failed`."""
        address, schedulers = attempts.address, 1
        if isinstance(failure, errors.RetryLater) and failure.reason and dns_name(address) is not None:
            schedulers = in_thread(schedulers_behind, address)
        return attempts.failed(failure, time.monotonic(), schedulers)

    def generate(
        self, attempts: Attempts, request: pb.GenerateRequest, timeout_s: float | None
    ) -> Replies[pb.GenerateResponse]:
        """Start the current attempt of a Generate call."""
        method = self._begin(attempts).scheduler.Generate
        address, metadata = attempts.address, attempts.sent(self.metadata)
        try:
            call = Replies(method(request, timeout=timeout_s, metadata=metadata))
        except BaseException:  # the channel was closed
            self._rotation.ended(address)
            raise
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
        request = self.named(request)
        name = type(request).__name__.removesuffix("Request")
        model = getattr(getattr(request, "request", request), "model", "")
        with call_span(request, self.metadata) as span:
            attempts = self.attempts(name, timeout_s, failover_timeout_s, key, model, span)
            reply = self._tried(attempts, method, request)
            span.saw(reply)
        return reply

    def _tried(
        self,
        attempts: Attempts,
        method: Callable[[Endpoint], grpc.UnaryUnaryMultiCallable[_Request, _Reply]],
        request: _Request,
    ) -> _Reply:
        while True:
            attempts.timeout_s(time.monotonic())
            endpoint = self._begin(attempts)
            address, metadata = attempts.address, attempts.sent(self.metadata)
            try:
                if not self._known.is_checked(address):  # their replies do not say which model answered
                    asked, left_s = pb.GetModelInfoRequest(), attempts.timeout_s(time.monotonic())
                    served = reply_of(endpoint.scheduler.GetModelInfo, asked, left_s, metadata)
                    self._check_model(address, served.model_fingerprint)
                left_s = attempts.timeout_s(time.monotonic())
                reply = reply_of(method(endpoint), request, left_s, metadata)
            except errors.PacelineError as error:
                failure = error
            else:
                attempts.answered()
                return reply
            finally:
                self._rotation.ended(address)
            if is_set_within(self.closed, self.failed(attempts, failure)):
                raise failure

    def is_serving(self, timeout_s: float | None) -> bool:
        """Whether a scheduler says by grpc.health.v1, without a token, that it serves: a given one first."""
        given = self._known.given
        for addresses in (given, self.addresses[len(given) :]):
            with self._at(addresses) as endpoints:
                checks: list[grpc.UnaryUnaryMultiCallable[None, bytes]] = [
                    endpoint.channel.unary_unary(
                        HEALTH_CHECK,
                        request_serializer=lambda _: b"",  # an empty HealthCheckRequest: the whole server
                        response_deserializer=lambda reply: reply,
                    )
                    for endpoint in endpoints
                ]
                if SERVING in replies_of(checks, None, timeout_s):
                    return True
        return False

    def call_each(
        self,
        method: Callable[[Endpoint], grpc.UnaryUnaryMultiCallable[_Request, _Reply]],
        request: _Request,
        timeout_s: float | None,
    ) -> list[_Reply]:
        """Make a unary call on all schedulers at once; the replies of those that answer.

        Raises the first `paceline.errors` if none does, and a given scheduler's sooner than a learned one's.
        """
        left_s = self._look_first(timeout_s)
        with self._at(self.addresses) as endpoints:
            outcomes = replies_of(map(method, endpoints), request, left_s, self.metadata)
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
        """Make a unary call on all schedulers of the model, one after the other.

        `timeout_s` is the deadline of each call. Raises the first `paceline.errors`.
        """
        self._look_first(timeout_s)
        foreign = self._known.foreign
        with self._at([one for one in self.addresses if one not in foreign]) as endpoints:
            return [reply_of(method(one), request, timeout_s, self.metadata) for one in endpoints]

    def stream(
        self,
        method: Callable[[Endpoint], grpc.UnaryStreamMultiCallable[_Request, _Reply]],
        request: _Request,
        timeout_s: float | None,
        parts: Callable[[_Reply], Iterable[_Part]],
        address: str = "",
    ) -> Iterator[_Part]:
        """The parts of replies of one address, or the first, until it is closed. Raises `paceline.errors`."""
        with self._at([address or self.addresses[0]]) as found:
            if not found:
                raise errors.NotFound(f"no scheduler is known at {address}")
            replies = Replies(method(found[0])(request, timeout=timeout_s, metadata=self.metadata))
            try:
                while (reply := replies.read()) is not None:
                    for part in parts(reply):
                        yield part
            finally:
                replies.cancel()
