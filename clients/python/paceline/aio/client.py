"""The asyncio client of schedulers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, Unpack

import grpc
import grpc.aio

from paceline import errors, requests, responses
from paceline.aio.calls import reply_of
from paceline.channel import PLAINTEXT, SCHEDULER_ADDRESS, Link, Security, open_aio_channel
from paceline.endpoint import SchedulerEndpoint
from paceline.failover import FAILOVER_TIMEOUT_S, Attempts, Rotation, addresses_of
from paceline.requests import Options
from paceline.resume import ResumableStream, identified
from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceStub
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from paceline.types import Aborted, Completion, Event, ExecutorStatus, MessageLike, ModelInfo, Started, Status

if TYPE_CHECKING:
    from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


_Endpoint: TypeAlias = "SchedulerEndpoint[grpc.aio.Channel, SchedulerServiceAsyncStub, AdminServiceAsyncStub]"


def _endpoint(address: str, security: Security) -> _Endpoint:
    channel = open_aio_channel(address, Link.PUBLIC, security)
    return SchedulerEndpoint(address, channel, SchedulerServiceStub(channel), AdminServiceStub(channel))


class Client:
    """One scheduler, or several that serve the same model. Use as an async context manager, or `close()` it.

        async with Client("127.0.0.1:50051") as client:
            async for event in client.generate("Once upon a time", max_tokens=64):
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
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channels; calls under way are cancelled."""
        self._closed = True
        for endpoint in self._endpoints:
            await endpoint.channel.close()

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

    async def complete(
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
        reply = await self._call(
            lambda endpoint: endpoint.scheduler.GenerateUnary,
            pb.GenerateUnaryRequest(request=request),
            timeout_s,
            self._failover_timeout_s,
        )
        return responses.completions(reply, max(request.n, 1))

    async def chat(
        self, messages: Sequence[MessageLike], *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The model's answer to a conversation: completion 0 of `complete`."""
        return (await self.complete(messages=messages, timeout_s=timeout_s, **options))[0]

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids that `generate` would use for a text or for messages."""
        request = requests.tokenize_request(text, messages)
        return list(
            (await self._call(lambda endpoint: endpoint.scheduler.Tokenize, request, timeout_s)).token_ids
        )

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of token ids."""
        request = requests.detokenize_request(token_ids)
        return (await self._call(lambda endpoint: endpoint.scheduler.Detokenize, request, timeout_s)).text

    async def abort(self, request_ids: Iterable[str], *, timeout_s: float | None = None) -> Aborted:
        """End requests of this identity, on all schedulers. Unknown ids are no error.

        Raises if no scheduler answered.
        """
        ids = list(request_ids)
        request = pb.AbortRequest(request_ids=ids)
        calls = [
            reply_of(endpoint.scheduler.Abort(request, timeout=timeout_s, metadata=self._metadata))
            for endpoint in self._endpoints
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        replies = [outcome for outcome in outcomes if isinstance(outcome, pb.AbortResponse)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not replies:
                raise outcome
        return responses.aborted(ids, replies)

    async def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """The model, and the limits of requests."""
        request = pb.GetModelInfoRequest()
        return responses.model_info(
            await self._call(lambda endpoint: endpoint.scheduler.GetModelInfo, request, timeout_s)
        )

    async def status(self, *, timeout_s: float | None = None) -> Status:
        """The live counters of one scheduler that answers."""
        request = pb.GetStatusRequest()
        return responses.status(
            await self._call(lambda endpoint: endpoint.scheduler.GetStatus, request, timeout_s)
        )

    async def executors(self, *, timeout_s: float | None = None) -> tuple[ExecutorStatus, ...]:
        """The executors behind one scheduler that answers. Needs admin rights where callers need tokens."""
        request = admin_pb2.ListExecutorsRequest()
        return responses.executors(
            await self._call(lambda endpoint: endpoint.admin.ListExecutors, request, timeout_s)
        )

    async def _call(
        self,
        method: Callable[[_Endpoint], grpc.aio.UnaryUnaryMultiCallable[_Request, _Reply]],
        request: _Request,
        timeout_s: float | None,
        failover_timeout_s: float = 0.0,
    ) -> _Reply:
        attempts = self._attempts(timeout_s, failover_timeout_s)
        while True:
            call, left_s = method(self._endpoints[attempts.address]), attempts.timeout_s(time.monotonic())
            try:
                reply = await reply_of(call(request, timeout=left_s, metadata=self._metadata))
            except errors.PacelineError as error:
                failure = error
            else:
                attempts.answered()
                return reply
            await asyncio.sleep(attempts.failed(failure, time.monotonic()))
            if self._closed:
                raise failure

    def _attempts(self, timeout_s: float | None, failover_timeout_s: float) -> Attempts:
        now = time.monotonic()
        return Attempts(self._rotation, now, timeout_s=timeout_s, failover_timeout_s=failover_timeout_s)


class Generation:
    """A running Generate call: an async iterator of events that may be closed at any time.

    The iteration ends when all completions have finished. It raises InternalError if the stream ends before,
    and StreamLost if the stream was interrupted and can't be continued. Leaving an `async with` block,
    `close()` and garbage collection cancel the request: the scheduler leaves it out of all further steps.
    """

    def __init__(self, client: Client, stream: ResumableStream, timeout_s: float | None) -> None:
        self._client = client
        self._stream = stream
        self._attempts = client._attempts(timeout_s, client._failover_timeout_s)
        self._call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse] | None = None
        self._closed = asyncio.Event()
        self._send()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._closed.is_set():
            raise StopAsyncIteration
        try:
            return await self._next()
        except errors.PacelineError:
            self.close()  # the stream is of no more use
            raise

    def __del__(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """Cancel the request if it is running, and end the iteration. Safe at any time."""
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

    async def request_id(self) -> str:
        """The request's id: the caller's, else a random one."""
        return self._stream.request_id

    async def collect(self) -> list[Completion]:
        """Read the stream to its end; returns its completions ordered by index."""
        collector = responses.Collector()
        async for event in self:
            collector.add(event)
        return collector.completions()

    async def text(self) -> str:
        """Read the stream to its end; returns the text of completion 0."""
        completions = await self.collect()
        return completions[0].text if completions else ""

    async def _next(self) -> Event:
        """The next event, of the current attempt or of one that continues it."""
        while True:
            assert self._call is not None
            try:
                message = await reply_of(self._call.read())
            except errors.PacelineError as error:
                failure = error
            else:
                if isinstance(message, pb.GenerateResponse):
                    self._attempts.answered()
                    if (event := self._stream.see(message)) is not None:
                        return event
                    continue
                if not self._closed.is_set():
                    self._stream.check_end()
                raise StopAsyncIteration
            if self._closed.is_set() or self._stream.is_complete:  # closed by another task, meanwhile
                raise StopAsyncIteration
            await self._recover(failure)

    async def _recover(self, failure: errors.PacelineError) -> None:
        """After a failed attempt: wait and begin another, or raise the error for the caller."""
        address = self._client._endpoints[self._attempts.address].address
        try:
            wait_s = self._attempts.failed(failure, time.monotonic())
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._closed.wait()
            if self._closed.is_set():
                raise StopAsyncIteration
            if self._client._closed:
                raise failure
            self._send()
        except errors.PacelineError as error:
            raise self._stream.final_error(error, address) from failure

    def _send(self) -> None:
        now = time.monotonic()
        request, left_s = self._stream.attempt(now), self._attempts.timeout_s(now)
        stub = self._client._endpoints[self._attempts.address].scheduler
        self._call = stub.Generate(request, timeout=left_s, metadata=self._client._metadata)
