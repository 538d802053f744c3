"""The blocking client of a scheduler. `paceline.aio.client` is its asyncio twin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self, TypeVar, Unpack

import grpc

from paceline import errors, requests, responses
from paceline.channel import PLAINTEXT, SCHEDULER_ADDRESS, Link, Security, open_channel
from paceline.requests import Options
from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceStub
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from paceline.types import Aborted, Completion, Event, ExecutorStatus, MessageLike, ModelInfo, Status

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class Client:
    """One scheduler. Use as a context manager, or `close()` it.

        with Client("127.0.0.1:50051") as client:
            for event in client.generate("Once upon a time", max_tokens=64):
                ...

    Prompts are exactly one of `prompt` (text as it is), `messages` (through the model's chat
    template) and `token_ids`. `timeout_s` is the call's deadline (None: none), which the scheduler
    honours too. All calls raise `paceline.errors`.
    """

    def __init__(self, address: str = SCHEDULER_ADDRESS, *, security: Security = PLAINTEXT) -> None:
        self.address = address
        self._metadata = security.metadata
        self._channel = open_channel(address, Link.PUBLIC, security)
        self._stub = SchedulerServiceStub(self._channel)
        self._admin = AdminServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Start generating; iterate over the result for Delta and Finished events."""
        request = requests.generate_request(prompt, messages, token_ids, options)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        return Generation(call, max(request.n, 1))

    def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Generate and wait; one Completion per index."""
        request = pb.GenerateUnaryRequest(
            request=requests.generate_request(prompt, messages, token_ids, options)
        )
        reply = self._call(self._stub.GenerateUnary, request, timeout_s)
        return responses.completions(reply, max(request.request.n, 1))

    def chat(
        self, messages: Sequence[MessageLike], *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The model's answer to a conversation (completion 0)."""
        return (self.complete(messages=messages, timeout_s=timeout_s, **options))[0]

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Token ids of text or messages, as `generate` would use them."""
        request = requests.tokenize_request(text, messages)
        return list((self._call(self._stub.Tokenize, request, timeout_s)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text of token ids."""
        request = requests.detokenize_request(token_ids)
        return (self._call(self._stub.Detokenize, request, timeout_s)).text

    def abort(self, request_ids: Iterable[str], *, timeout_s: float | None = None) -> Aborted:
        """End live requests of this identity; unknown ids are no error."""
        request = pb.AbortRequest(request_ids=request_ids)
        return responses.aborted(self._call(self._stub.Abort, request, timeout_s))

    def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """The model and the limits of a request."""
        return responses.model_info(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s))

    def status(self, *, timeout_s: float | None = None) -> Status:
        """Live counters."""
        return responses.status(self._call(self._stub.GetStatus, pb.GetStatusRequest(), timeout_s))

    def executors(self, *, timeout_s: float | None = None) -> tuple[ExecutorStatus, ...]:
        """The executors behind the scheduler; only for admins, where callers need tokens."""
        request = admin_pb2.ListExecutorsRequest()
        return responses.executors(self._call(self._admin.ListExecutors, request, timeout_s))

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        timeout_s: float | None,
    ) -> _Reply:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise errors.from_rpc(error) from None


class Generation:
    """A running Generate call: an iterator of events that can be left at any time.

    The iteration ends when all completions have finished; a stream that ends before raises InternalError.
    Leaving (`with`, `close()`, or letting go of it) cancels the request: the scheduler
    computes nothing for it from the next step on.
    """

    def __init__(self, call: grpc._CallIterator[pb.GenerateResponse], n: int) -> None:
        self._call = call
        self._progress = responses.Progress(n)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._closed:
            raise StopIteration
        try:
            while (event := responses.event(next(self._call))) is None:
                pass
            return self._progress.see(event)
        except StopIteration:
            if not self._closed:
                self._progress.check_end()
            raise
        except errors.InternalError:  # it makes no sense to us: nobody reads on
            self.close()
            raise
        except grpc.RpcError as error:
            if self._closed:  # by another thread, meanwhile
                raise StopIteration from None
            raise errors.from_rpc(error) from None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is still running, and end the iteration. Safe at any time, from any thread."""
        self._closed = True
        self._call.cancel()

    def request_id(self) -> str:
        """The request's id, once the scheduler has taken it."""
        metadata = self._call.initial_metadata()
        return str(dict(metadata or ()).get("request-id", ""))

    def collect(self) -> list[Completion]:
        """Read to the end; one Completion per index."""
        collector = responses.Collector()
        for event in self:
            collector.add(event)
        return collector.completions()

    def text(self) -> str:
        """Read to the end; the text of completion 0."""
        completions = self.collect()
        return completions[0].text if completions else ""
