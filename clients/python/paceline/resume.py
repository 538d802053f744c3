"""A stream that outlives its scheduler: what was received, and the request that continues it. Pure.

Shared by the blocking and the asyncio client. See RETRIES and Continuation in scheduler.proto.
"""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, field, replace

from paceline import responses
from paceline.errors import DuplicateRequest, PacelineError, RetryLater, StaleState, StreamLost
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import Delta, Event, Finished, Started


def identified(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request, with an id and a seed drawn if it has none: sent again, it is the same request."""
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    if not request.sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(64)
    return request


@dataclass(slots=True)
class _Received:
    """What has come of one completion."""

    token_ids: list[int] = field(default_factory=list)
    text_bytes: int = 0  # UTF-8
    first_us: int | None = None  # when the first tokens came, since the request's arrival
    finished: bool = False


class ResumableStream:
    """One Generate call as its caller sees it, over as many attempts as it takes.

    Per attempt: send `attempt()`, then give each message to `see()`; when the attempt was lost, begin
    another. The events of all attempts together are those of a stream that was never interrupted. Times
    in them count from the first attempt on, and `cached_tokens` is its; preemptions, drafts and queue_ms
    are the last attempt's, for a scheduler tells them only with the end.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        """`request`: with an id and a seed; kept, and changed where `returns` says text alone."""
        self._request = request
        # To be continued, a stream must have its token ids, whether its caller wants them or not.
        self._text_only = request.returns == pb.RETURNS_TEXT
        if self._text_only:
            request.returns = pb.RETURNS_BOTH
        n = max(request.n, 1)
        self._progress = responses.Progress(n)
        self._received = [_Received() for _ in range(n)]
        self._began_at: float | None = None  # when the attempt was sent that brought the first event
        self._sent_at = 0.0
        self._offset_us = 0  # from the first attempt to this one
        self._first: pb.Started | None = None
        self._attempt_started = False
        self._continued: int | None = None  # tokens sent in this attempt's continuation
        self.resumptions = 0  # attempts that continued what an earlier one had begun

    @property
    def request_id(self) -> str:
        """The caller's, or drawn."""
        return self._request.request_id

    @property
    def has_begun(self) -> bool:
        """Events have been received: from now on the stream can be continued, not sent again."""
        return self._began_at is not None

    @property
    def is_complete(self) -> bool:
        """All completions have finished: whatever the call's status is, nothing is missing."""
        return all(one.finished for one in self._received)

    @property
    def started(self) -> Started | None:
        """What the first scheduler said of the stream; None until it has begun."""
        return None if self._first is None else responses.started(self._first)

    def attempt(self, now: float) -> pb.GenerateRequest:
        """The request to send now: the caller's, or its continuation.

        Raises StreamLost if there can't be one.
        """
        self._attempt_started = False
        self._sent_at = now
        if self._began_at is None:
            self._first = None
            return self._request
        if self._first is None:
            raise StreamLost("the stream was lost, and its scheduler is too old to say how to continue it")
        self.resumptions += 1
        self._offset_us = round(1e6 * (now - self._began_at))
        self._continued = sum(len(one.token_ids) for one in self._received)
        return self._continuation(self._first)

    def see(self, message: pb.GenerateResponse) -> Event | None:
        """Take the next message; the event in it for the caller, if there is one.

        Raises StreamLost if the scheduler ignores the continuation, InternalError if the message makes no
        sense.
        """
        if message.WhichOneof("event") == "started":
            self._see_started(message.started)
            return None
        event = responses.event(message)
        if event is None:
            return None
        if self._continued is not None and not self._attempt_started:
            raise self._ignored(0)
        self._progress.see(event)
        if self._began_at is None:
            self._began_at = self._sent_at
        received = self._received[event.index]
        if isinstance(event, Finished):
            received.finished = True
            return self._whole_end(event, received) if self.resumptions else event
        return self._take(event, received)

    def check_end(self) -> None:
        """The call has ended OK. Raises InternalError if a completion is unfinished."""
        self._progress.check_end()

    def lost_for_good(self, error: PacelineError, address: str) -> PacelineError:
        """The error for the caller when `error`, which came from `address`, ends the last attempt."""
        if not self.has_begun:
            return error
        text = f"the stream was interrupted, and could not be continued: {error.message} ({address})"
        if isinstance(error, RetryLater | DuplicateRequest):  # a duplicate: of the attempt before
            return StreamLost(text, reason=error.reason, metadata=error.metadata)
        if isinstance(error, StaleState) and self._continued is not None:
            return StaleState(text, reason=error.reason, metadata=error.metadata)
        return error

    def _see_started(self, message: pb.Started) -> None:
        if self._attempt_started:
            return
        self._attempt_started = True
        if self._first is None:
            self._first = message
        if self._continued is not None and message.continued_tokens != self._continued:
            raise self._ignored(message.continued_tokens)

    def _ignored(self, continued: int) -> StreamLost:
        return StreamLost(
            "the stream was interrupted, and could not be continued: the scheduler took over "
            f"{continued} of {self._continued} tokens received (0: it knows no continuations)"
        )

    def _take(self, event: Delta, received: _Received) -> Delta | None:
        received.token_ids += event.token_ids
        received.text_bytes += len(event.text.encode())
        if self._offset_us:
            event = replace(event, elapsed_us=event.elapsed_us + self._offset_us)
        if received.first_us is None:
            received.first_us = event.elapsed_us
        if self._text_only:
            return replace(event, token_ids=(), logprobs=()) if event.text else None
        return event

    def _whole_end(self, event: Finished, received: _Received) -> Finished:
        """The end of a completion, with the usage of all attempts."""
        assert self._first is not None
        usage, offset_ms = event.usage, self._offset_us // 1000
        first_ms = usage.first_token_ms + offset_ms
        if received.first_us is not None:
            first_ms = min(first_ms, received.first_us // 1000)
        return replace(
            event,
            usage=replace(
                usage,
                cached_tokens=self._first.cached_tokens,
                first_token_ms=first_ms,
                total_ms=usage.total_ms + offset_ms,
            ),
        )

    def _continuation(self, started: pb.Started) -> pb.GenerateRequest:
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.sampling.CopyFrom(started.sampling)
        request.stop.max_tokens = started.max_tokens
        continuation = request.continuation
        continuation.prompt_digest = started.prompt_digest
        continuation.model_fingerprint = started.model_fingerprint
        continuation.sampler = started.sampler
        text_is_received = self._request.returns != pb.RETURNS_TOKEN_IDS
        for index, one in enumerate(self._received):
            if one.token_ids or one.finished:
                continuation.completions.add(
                    index=index,
                    token_ids=one.token_ids,
                    text_bytes=one.text_bytes if text_is_received else 0,
                    finished=one.finished,
                )
        return request
