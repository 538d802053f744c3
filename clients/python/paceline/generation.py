# Generated from aio/generation.py by .ci/blocking-clients: change that.
"""A running Generate call of the blocking client."""

from __future__ import annotations

import time
from typing import Generic, Self

from paceline import errors
from paceline.call_spans import call_span
from paceline.calls import Flag, Replies, is_set_within
from paceline.collector import Collector
from paceline.connections import SchedulerConnections
from paceline.resume import END_TIMEOUT_S, ResumableStream
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.schemas import Parsed, SchemaLike
from paceline.types import Completion, Event, Started, TokenLogprobs


class Generation(Generic[Parsed]):
    """A running Generate call: an iterator of events that may be closed at any time.

    The iteration ends when all completions have finished. It raises InternalError if the stream ends before,
    and StreamLost if the stream was interrupted and can't be continued. Leaving a `with` block,
    `close()` and garbage collection cancel the request: the scheduler leaves it out of all further steps.
    """

    def __init__(
        self,
        schedulers: SchedulerConnections,
        stream: ResumableStream,
        timeout_s: float | None,
        schema: SchemaLike[Parsed] | None,
        key: bytes,
    ) -> None:
        """`key`: of the connections' `affinity`."""
        self._schedulers = schedulers
        self._stream = stream
        self._collector = Collector(schema)
        self._span = call_span(stream.request, schedulers.metadata)
        self._attempts = schedulers.attempts(
            "Generate", timeout_s, schedulers.failover_timeout_s, key, stream.model, self._span
        )
        self._call: Replies[pb.GenerateResponse] | None = None
        self._closed = Flag()
        try:
            self._begin_attempt()
        except errors.PacelineError as error:
            self._span.end(error)
            raise

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
            event = self._next()
        except errors.PacelineError as error:
            self._span.end(error)
            self.close()  # the stream is of no more use
            raise
        except StopIteration:
            self._span.end()
            raise
        self._span.saw(event)
        self._collector.add(event)
        return event

    def __del__(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._span.end()

    def close(self) -> None:
        """Cancel the request if it is running, and end the iteration. Safe at any time.

        The blocking client's may be called from any thread.
        """
        self._closed.set()
        self._span.end()
        if self._call is not None:
            self._call.cancel()

    def cancel(self) -> None:
        """The same as `close`."""
        self.close()

    @property
    def started(self) -> Started | None:
        """The request with its defaults filled in, as the scheduler reports it; None before any event."""
        return self._stream.started

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the prompt's tokens, each given all before it, if the option of this name is set.

        Item i is that of token i + 1: the first token has none. All are there when the first event is.
        """
        return self._stream.prompt_logprobs

    @property
    def resumptions(self) -> int:
        """How often the stream was interrupted and continued."""
        return self._stream.resumptions

    def request_id(self) -> str:
        """The request's id: the caller's, else a random one."""
        return self._stream.request_id

    def collect(self) -> list[Completion[Parsed]]:
        """Read the rest of the stream; returns its completions from their beginning, ordered by index."""
        for _ in self:
            pass
        return self._collector.completions()

    def text(self) -> str:
        """Read the rest of the stream; returns the whole text of completion 0."""
        completions = self.collect()
        return completions[0].text if completions else ""

    def _next(self) -> Event:
        """The next event, of the current attempt or of one that continues it."""
        while True:
            assert self._call is not None
            # If only the end of the stream is missing, it comes soon, or is made.
            limit_s = END_TIMEOUT_S if self._stream.is_complete else None
            try:
                message = self._call.read(limit_s)
                if message is not None:
                    self._schedulers.check_started(self._attempts.address, message)
            except errors.PacelineError as error:
                self._call.cancel()
                failure = error
            else:
                if message is not None:
                    self._attempts.answered(message.started.model_fingerprint)
                    if (event := self._stream.see(message)) is not None:
                        return event
                    continue
                if not self._closed.is_set():
                    self._stream.check_end()
                raise StopIteration
            if self._closed.is_set() or self._stream.is_complete:  # closed meanwhile
                raise StopIteration
            self._recover(failure)

    def _recover(self, failure: errors.PacelineError) -> None:
        """After a failed attempt: wait and begin another, or raise the error for the caller."""
        address = self._attempts.address
        try:
            wait_s = self._schedulers.failed(self._attempts, failure)
            if is_set_within(self._closed, wait_s):
                raise StopIteration
            if self._schedulers.closed.is_set():
                raise failure
            self._begin_attempt()
        except errors.PacelineError as error:
            raise self._stream.final_error(error, address) from failure

    def _begin_attempt(self) -> None:
        """Send the request, or its continuation, to the current attempt's scheduler, without waiting.

        Raises DeadlineExceeded when the caller's timeout has passed, StreamLost if there is no continuation.
        """
        now = time.monotonic()
        request, left_s = self._stream.attempt(now), self._attempts.timeout_s(now)
        self._call = self._schedulers.generate(self._attempts, request, left_s)
        if self._closed.is_set():
            self._call.cancel()
