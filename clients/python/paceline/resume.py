"""Continues an interrupted stream on another scheduler: what was received, and the next request. Pure.

Shared by the blocking and the asyncio client. The rules are RETRIES and Continuation in scheduler.proto.
"""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, field, replace

from paceline import responses
from paceline.bounds import Bounds
from paceline.errors import (
    DuplicateRequest,
    InternalError,
    NotFound,
    PacelineError,
    RetryLater,
    StaleState,
    StreamLost,
    incomplete,
)
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import Delta, Event, Finished, Started, TokenLogprobs

END_TIMEOUT_S = 1.0
"""Wait for a stream's end when all completions have finished: a scheduler that hangs then holds nobody."""

MAX_FRUITLESS = 8
"""Attempts in a row that were begun and brought no token, after which the request is not sent again."""


def identified(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The same request object, given a random id and seed if it has none.

    With both, sending it again repeats the same request.
    """
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    if not request.sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(64)
    return request


@dataclass(slots=True)
class _Received:
    """The part of one completion that was received so far. Lengths of text are those of its UTF-8."""

    token_ids: list[int] = field(default_factory=list)
    text_bytes: int = 0
    reasoning_bytes: int = 0
    argument_bytes: list[int] = field(default_factory=list)  # of each tool call that has begun
    first_us: int | None = None  # from the request's arrival to its first tokens, in microseconds
    named_bytes: int = 0  # of ids and names of tool calls
    finished: bool = False

    @property
    def sent_bytes(self) -> int:
        """All text: the answer's, reasoning, tool calls."""
        return self.text_bytes + self.reasoning_bytes + self.named_bytes + sum(self.argument_bytes)

    def add(self, delta: Delta) -> None:
        """Count a delta in. Raises InternalError if it contradicts earlier ones."""
        self.token_ids += delta.token_ids
        self.text_bytes += len(delta.text.encode())
        self.reasoning_bytes += len(delta.reasoning.encode())
        for call in delta.tool_calls:
            begins = call.index == len(self.argument_bytes)
            if call.index > len(self.argument_bytes) or bool(call.name) != begins:
                raise InternalError(f"tool call {call.index} does not begin with its name, and once")
            if begins:
                self.argument_bytes.append(0)
            self.argument_bytes[call.index] += len(call.arguments.encode())
            self.named_bytes += len(call.id.encode()) + len(call.name.encode())
        if self.first_us is None:
            self.first_us = delta.elapsed_us


class ResumableStream:
    """Joins the attempts of one Generate call into one stream of events.

    For each attempt, send the request that `attempt()` returns, then pass each message to `see()`; when
    the attempt is lost, begin another. The events of all attempts together equal those of a stream that was
    never interrupted. Times count from the attempt that brought the first event; `cached_tokens` is its own.
    Preemptions, drafts and queue_ms are the last attempt's alone: a scheduler reports them only at the end.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        """`request` has an id and a seed (see `identified`). It is kept, and its `returns` may be changed."""
        self._request = request
        # A continuation needs the token ids, even if the caller wants the text alone.
        self._text_only = request.returns == pb.RETURNS_TEXT
        if self._text_only:
            request.returns = pb.RETURNS_BOTH
        n = max(request.n, 1)
        self._bounds = Bounds(request)
        self._progress = responses.Progress(n)
        self._received = [_Received() for _ in range(n)]
        self._began_at: float | None = None  # send time of the attempt that brought the first event
        self._sent_at = 0.0  # send time of the current attempt
        self._offset_us = 0  # from `_began_at` to the current attempt
        # Of the attempt that brought the first event; before that event, of the current attempt.
        self._first: pb.Started | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._attempt_started = False  # whether the current attempt brought a Started
        self._continued: int | None = None  # tokens in the current attempt's continuation
        self._fruitless = 0  # attempts in a row that began and brought no token
        self.resumptions = 0  # number of attempts with a continuation

    @property
    def request_id(self) -> str:
        """The caller's id, else the random one."""
        return self._request.request_id

    @property
    def request(self) -> pb.GenerateRequest:
        """The caller's request, with its id and seed. Not to be changed."""
        return self._request

    @property
    def model(self) -> str:
        """What the request names: the model, an adapter, or "" for the model."""
        return self._request.model

    @property
    def has_begun(self) -> bool:
        """Whether events were received: then the request must be continued instead of sent again."""
        return self._began_at is not None

    @property
    def is_complete(self) -> bool:
        """Whether all completions have finished: then nothing is missing, whatever the call's status."""
        return all(one.finished for one in self._received)

    @property
    def started(self) -> Started | None:
        """The request with its defaults filled in, as reported to the attempt that brought the first event.

        Before that event: to the current attempt; None if it has not been reported yet.
        """
        return None if self._first is None else responses.started(self._first)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the prompt's tokens after the first, if they were requested; complete with the first event."""
        return tuple(self._prompt_logprobs)

    def attempt(self, now: float) -> pb.GenerateRequest:
        """Begin an attempt at time `now` (seconds); the request to send: the caller's, or its continuation.

        Raises StreamLost if events were received from a scheduler that sends no Started, and after
        MAX_FRUITLESS attempts in a row that a scheduler began and that brought no token.
        """
        tokens = sum(len(one.token_ids) for one in self._received)
        self._fruitless = self._fruitless + self._attempt_started if tokens == (self._continued or 0) else 0
        if self._fruitless >= MAX_FRUITLESS:
            raise StreamLost(f"the stream was interrupted {MAX_FRUITLESS} times without a token between")
        self._attempt_started = False
        self._sent_at = now
        if self._began_at is None:
            self._first = None
            self._prompt_logprobs.clear()
            return self._request
        if self._first is None:
            raise StreamLost("the stream was lost, and its scheduler is too old to say how to continue it")
        self.resumptions += 1
        self._offset_us = round(1e6 * (now - self._began_at))
        self._continued = tokens
        return self._continuation(self._first)

    def see(self, message: pb.GenerateResponse) -> Event | None:
        """Record the next message of the attempt; returns its event for the caller, or None.

        Raises StreamLost if the scheduler ignores the continuation, InternalError if the message
        contradicts earlier ones.
        """
        kind = message.WhichOneof("event")
        if kind == "started":
            self._see_started(message.started)
            return None
        if kind == "prompt_logprobs":
            self._see_prompt_logprobs(message.prompt_logprobs)
            return None
        event = responses.event(message)
        if event is None:
            return None
        if self._continued is not None and not self._attempt_started:
            raise self._ignored(0)
        self._progress.see(event)
        if self._began_at is None:
            self._check_prompt_logprobs()
            self._began_at = self._sent_at
        received = self._received[event.index]
        if isinstance(event, Finished):
            received.finished = True
            return self._with_joined_usage(event, received) if self.resumptions else event
        return self._record(event, received)

    def check_end(self) -> None:
        """Call when an attempt has ended OK. Raises InternalError if a completion is unfinished."""
        self._progress.check_end()

    def final_error(self, error: PacelineError, address: str) -> PacelineError:
        """The error for the caller when the last attempt, at `address`, ended with `error`.

        Without events received, it is `error`. After events the caller must not send the request again as if
        nothing had happened: errors that invite to do so become StreamLost.
        """
        if not self.has_begun:
            return error
        text = f"the stream was interrupted, and could not be continued: {error.message} ({address})"
        if isinstance(
            error, RetryLater | DuplicateRequest
        ):  # a duplicate: the previous attempt's request still runs there
            return StreamLost(text, reason=error.reason, metadata=error.metadata)
        if isinstance(error, StaleState | NotFound) and self._continued is not None:
            return type(error)(text, reason=error.reason, metadata=error.metadata)
        return error

    def _see_started(self, message: pb.Started) -> None:
        if self._attempt_started:
            raise InternalError("the scheduler began the stream twice")
        self._attempt_started = True
        if self._first is None:
            self._first = message
            self._bounds.announce(message)
        if self._continued is not None and message.continued_tokens != self._continued:
            raise self._ignored(message.continued_tokens)
        if message.model_fingerprint != self._first.model_fingerprint:
            raise StreamLost("the stream was interrupted, and the scheduler that goes on has another model")

    def _see_prompt_logprobs(self, message: pb.PromptLogprobs) -> None:
        if self.has_begun or not self._request.HasField("prompt_logprobs"):
            return  # a continuation repeats them
        if message.first != 1 + len(self._prompt_logprobs):
            raise InternalError(
                f"logprobs of the prompt from token {message.first} on, behind {len(self._prompt_logprobs)}"
            )
        self._prompt_logprobs += responses.token_logprobs(message.logprobs)
        if self._first is None or len(self._prompt_logprobs) >= max(self._first.prompt_tokens, 1):
            raise incomplete("more logprobs of the prompt came than it has tokens")

    def _check_prompt_logprobs(self) -> None:
        """Call before the first event. Raises InternalError if some are missing that were requested."""
        if self._first is None or not self._request.HasField("prompt_logprobs"):
            return
        found, wanted = len(self._prompt_logprobs), self._first.prompt_tokens - 1
        if found != wanted:
            raise incomplete(f"{found} logprobs of the prompt came before the first token, not {wanted}")

    def _ignored(self, continued: int) -> StreamLost:
        return StreamLost(
            "the stream was interrupted, and could not be continued: the scheduler took over "
            f"{continued} of {self._continued} tokens received (0: it knows no continuations)"
        )

    def _record(self, event: Delta, received: _Received) -> Delta | None:
        if self._offset_us:
            event = replace(event, elapsed_us=event.elapsed_us + self._offset_us)
        received.add(event)
        self._bounds.check(event, len(received.token_ids), received.sent_bytes)
        if self._text_only:
            has_text = event.text or event.reasoning or event.tool_calls
            return replace(event, token_ids=(), logprobs=()) if has_text else None
        return event

    def _with_joined_usage(self, event: Finished, received: _Received) -> Finished:
        """The end of a continued completion, with times and cached tokens as `ResumableStream` defines."""
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
        continuation.adapter_fingerprint = started.adapter_fingerprint
        for index, one in enumerate(self._received):
            if one.token_ids or one.finished:
                continuation.completions.add(
                    index=index,
                    token_ids=one.token_ids,
                    text_bytes=one.text_bytes,
                    finished=one.finished,
                    reasoning_bytes=one.reasoning_bytes,
                    argument_bytes=one.argument_bytes,
                )
        return request
