"""The blocking client of schedulers. `paceline.aio.client` has the same client for asyncio."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Self, TypeVar, Unpack

import grpc

from paceline import errors, requests, responses
from paceline.channel import PLAINTEXT, SCHEDULER_ADDRESS, Link, Security, open_channel
from paceline.endpoint import SchedulerEndpoint
from paceline.failover import FAILOVER_TIMEOUT_S, Attempts, Rotation, addresses_of
from paceline.requests import Options
from paceline.resume import ResumableStream, identified
from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceStub
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from paceline.types import Aborted, Completion, Event, ExecutorStatus, MessageLike, ModelInfo, Started, Status

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


_Endpoint = SchedulerEndpoint[grpc.Channel, SchedulerServiceStub, AdminServiceStub]


def _endpoint(address: str, security: Security) -> _Endpoint:
    channel = open_channel(address, Link.PUBLIC, security)
    return SchedulerEndpoint(address, channel, SchedulerServiceStub(channel), AdminServiceStub(channel))


class Client:
    """One scheduler, or several that serve the same model. Use as a context manager, or `close()` it.

        with Client("127.0.0.1:50051") as client:
            for event in client.generate("Once upon a time", max_tokens=64):
                ...

    `addresses` is a sequence, or one comma-separated string. Calls are spread over the addresses, and a call
    that one scheduler refuses is tried on the others. A stream whose scheduler dies is continued without a
    gap on another one, or on the same one after its restart; it raises StreamLost if that does not succeed
    within `failover_timeout_s`.

    A request has exactly one of `prompt` (text, without a chat template), `messages` (formatted with the
    model's chat template) and `token_ids`. `timeout_s` is the deadline of all attempts of a call together,
    which the scheduler enforces too; None: no deadline. All calls raise `paceline.errors`.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = SCHEDULER_ADDRESS,
        *,
        security: Security = PLAINTEXT,
        failover_timeout_s: float = FAILOVER_TIMEOUT_S,
    ) -> None:
        self.addresses = addresses_of(addresses)
        self._metadata = security.metadata
        self._failover_timeout_s = failover_timeout_s
        self._endpoints = [_endpoint(address, security) for address in self.addresses]
        self._rotation = Rotation(len(self._endpoints))
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channels; calls under way are cancelled."""
        self._closed.set()
        for endpoint in self._endpoints:
            endpoint.channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Start generating. Iterating over the result yields Delta and Finished events."""
        request = requests.generate_request(prompt, messages, token_ids, options)
        return Generation(self, ResumableStream(identified(request)), timeout_s)

    def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Generate, and wait until all completions have finished; returns them ordered by index."""
        request = identified(requests.generate_request(prompt, messages, token_ids, options))
        reply = self._call(
            lambda endpoint: endpoint.scheduler.GenerateUnary,
            pb.GenerateUnaryRequest(request=request),
            timeout_s,
            self._failover_timeout_s,
        )
        return responses.completions(reply, max(request.n, 1))

    def chat(
        self, messages: Sequence[MessageLike], *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The model's answer to a conversation: completion 0 of `complete`."""
        return self.complete(messages=messages, timeout_s=timeout_s, **options)[0]

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids that `generate` would use for a text or for messages."""
        request = requests.tokenize_request(text, messages)
        return list(self._call(lambda endpoint: endpoint.scheduler.Tokenize, request, timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of token ids."""
        request = requests.detokenize_request(token_ids)
        return self._call(lambda endpoint: endpoint.scheduler.Detokenize, request, timeout_s).text

    def abort(self, request_ids: Iterable[str], *, timeout_s: float | None = None) -> Aborted:
        """End requests of this identity, on all schedulers. Unknown ids are no error.

        Raises if no scheduler answered.
        """
        ids = list(request_ids)
        replies, failure = [], None
        for endpoint in self._endpoints:
            try:
                request = pb.AbortRequest(request_ids=ids)
                replies.append(endpoint.scheduler.Abort(request, timeout=timeout_s, metadata=self._metadata))
            except grpc.RpcError as error:
                failure = errors.from_rpc(error)
        if failure is not None and not replies:
            raise failure
        return responses.aborted(ids, replies)

    def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """The model, and the limits of requests."""
        request = pb.GetModelInfoRequest()
        return responses.model_info(
            self._call(lambda endpoint: endpoint.scheduler.GetModelInfo, request, timeout_s)
        )

    def status(self, *, timeout_s: float | None = None) -> Status:
        """The live counters of one scheduler that answers."""
        return responses.status(
            self._call(lambda endpoint: endpoint.scheduler.GetStatus, pb.GetStatusRequest(), timeout_s)
        )

    def executors(self, *, timeout_s: float | None = None) -> tuple[ExecutorStatus, ...]:
        """The executors behind one scheduler that answers. Needs admin rights where callers need tokens."""
        request = admin_pb2.ListExecutorsRequest()
        return responses.executors(
            self._call(lambda endpoint: endpoint.admin.ListExecutors, request, timeout_s)
        )

    def _call(
        self,
        method: Callable[[_Endpoint], grpc.UnaryUnaryMultiCallable[_Request, _Reply]],
        request: _Request,
        timeout_s: float | None,
        failover_timeout_s: float = 0.0,
    ) -> _Reply:
        attempts = self._attempts(timeout_s, failover_timeout_s)
        while True:
            call, left_s = method(self._endpoints[attempts.address]), attempts.timeout_s(time.monotonic())
            try:
                reply = call(request, timeout=left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = errors.from_rpc(error)
            else:
                attempts.answered()
                return reply
            if self._closed.wait(attempts.failed(failure, time.monotonic())):
                raise failure

    def _attempts(self, timeout_s: float | None, failover_timeout_s: float) -> Attempts:
        now = time.monotonic()
        return Attempts(self._rotation, now, timeout_s=timeout_s, failover_timeout_s=failover_timeout_s)


class Generation:
    """A running Generate call: an iterator of events that may be closed at any time.

    The iteration ends when all completions have finished. It raises InternalError if the stream ends before,
    and StreamLost if the stream was interrupted and can't be continued. Leaving a `with` block, `close()`
    and garbage collection cancel the request: the scheduler leaves it out of all further steps.
    """

    def __init__(self, client: Client, stream: ResumableStream, timeout_s: float | None) -> None:
        self._client = client
        self._stream = stream
        self._attempts = client._attempts(timeout_s, client._failover_timeout_s)
        self._call: grpc._CallIterator[pb.GenerateResponse] | None = None
        self._closed = threading.Event()
        self._send()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._closed.is_set():
            raise StopIteration
        try:
            return self._next()
        except errors.PacelineError:
            self.close()  # the stream is of no more use
            raise

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it is running, and end the iteration. Safe at any time, from any thread."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    @property
    def started(self) -> Started | None:
        """The resolved request, as the scheduler reports it; None before the first event."""
        return self._stream.started

    @property
    def resumptions(self) -> int:
        """How often the stream was interrupted and continued."""
        return self._stream.resumptions

    def request_id(self) -> str:
        """The request's id: the caller's, else a random one."""
        return self._stream.request_id

    def collect(self) -> list[Completion]:
        """Read the stream to its end; returns its completions ordered by index."""
        collector = responses.Collector()
        for event in self:
            collector.add(event)
        return collector.completions()

    def text(self) -> str:
        """Read the stream to its end; returns the text of completion 0."""
        completions = self.collect()
        return completions[0].text if completions else ""

    def _next(self) -> Event:
        """The next event, of the current attempt or of one that continues it."""
        assert self._call is not None
        while True:
            try:
                message = next(self._call)
            except StopIteration:
                if not self._closed.is_set():
                    self._stream.check_end()
                raise
            except grpc.RpcError as error:
                failure = errors.from_rpc(error)
            else:
                self._attempts.answered()
                if (event := self._stream.see(message)) is not None:
                    return event
                continue
            if self._closed.is_set() or self._stream.is_complete:  # closed by another thread, meanwhile
                raise StopIteration
            self._recover(failure)

    def _recover(self, failure: errors.PacelineError) -> None:
        """After a failed attempt: wait and begin another, or raise the error for the caller."""
        address = self._client._endpoints[self._attempts.address].address
        try:
            wait_s = self._attempts.failed(failure, time.monotonic())
            if self._closed.wait(wait_s):
                raise StopIteration
            if self._client._closed.is_set():
                raise failure
            self._send()
        except errors.PacelineError as error:
            raise self._stream.final_error(error, address) from failure

    def _send(self) -> None:
        now = time.monotonic()
        request, left_s = self._stream.attempt(now), self._attempts.timeout_s(now)
        stub = self._client._endpoints[self._attempts.address].scheduler
        self._call = stub.Generate(request, timeout=left_s, metadata=self._client._metadata)
        if self._closed.is_set():
            self._call.cancel()
