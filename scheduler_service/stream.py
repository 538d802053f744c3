"""One request's answer on its way to its client.

The loop pushes tokens and ends in; one reader, the RPC's handler, takes messages out. What the
reader has not taken yet is merged: a slow reader gets fewer and larger deltas, and memory is bounded
by the request's own length. The stream ends exactly once, with all completions finished or with one
error; a push after that is ignored, for a step in flight may still bring tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.codec.responses import delta_response, finished_message
from scheduler_service.core.events import Finished, Tokens
from scheduler_service.core.step import TopLogprobs
from scheduler_service.errors import ServiceError
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.stop_strings import StopMatcher, StopStrings

MAX_DELTA_TOKENS = 1024
"""Of one message: with logprobs of 20 alternatives it stays far below 4 MiB."""


class Completion:
    """One completion's tokens and text that wait for the reader."""

    def __init__(self, index: int, detokenizer: Detokenizer | None, matcher: StopMatcher | None) -> None:
        self.index = index
        self.finished: Finished | None = None
        self.stop_string: str | None = None
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._ids: list[int] = []
        self._text = ""
        self._logprobs: list[TopLogprobs] = []

    def push(self, event: Tokens, terminators: frozenset[int]) -> str | None:
        """Take new tokens; returns the stop string that they completed, if they did."""
        ids = event.ids
        self._ids += ids
        if event.logprobs:
            self._logprobs += event.logprobs
        if self._detokenizer is not None:
            # A terminator can only be the last token, and is no part of the text.
            text = self._detokenizer.push(ids[:-1] if ids[-1] in terminators else ids)
            if self._matcher is not None and text:
                text, self.stop_string = self._matcher.push(text)
            self._text += text
        return self.stop_string

    def finish(self, event: Finished) -> None:
        """Nothing follows: let go of what was held back."""
        self.finished = event
        if self._detokenizer is not None and self.stop_string is None:
            text = self._detokenizer.flush()
            if self._matcher is not None:
                text, self.stop_string = self._matcher.push(text)
                text += "" if self.stop_string else self._matcher.flush()
            self._text += text

    def take(self) -> list[pb.GenerateResponse]:
        """All that waits, as messages; the last one is the end if there is one."""
        ids, text, logprobs = self._ids, self._text, self._logprobs
        messages = []
        if ids or text:
            self._ids, self._text, self._logprobs = [], "", []
            if len(ids) <= MAX_DELTA_TOKENS:
                messages.append(delta_response(self.index, ids, text, logprobs))
            else:  # the text goes with the last piece: it may lag behind the ids, never lead them
                for start in range(0, len(ids), MAX_DELTA_TOKENS):
                    end = start + MAX_DELTA_TOKENS
                    tail = text if end >= len(ids) else ""
                    messages.append(delta_response(self.index, ids[start:end], tail, logprobs[start:end]))
        if self.finished is not None:
            end_message = finished_message(self.finished, self.stop_string)
            messages.append(pb.GenerateResponse(index=self.index, finished=end_message))
        return messages


class Readers:
    """Wakes the readers of streams a few at a time, so that the loop gets its turn between them.

    A write costs as much as all else that is done for a token. When the event loop can't keep up, the
    next step goes first, and streams that still wait here get more tokens in one message.
    """

    AT_ONCE = 4

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def wake(self, reader: asyncio.Future[None]) -> None:
        """This reader has something to take."""
        if not self._waiting:
            reader.get_loop().call_soon(self._some)
        self._waiting.append(reader)

    def _some(self) -> None:
        waiting = self._waiting
        for _ in range(min(self.AT_ONCE, len(waiting))):
            reader = waiting.popleft()
            if not reader.done():  # else its task was cancelled
                reader.set_result(None)
        if waiting:
            waiting[0].get_loop().call_soon(self._some)


class RequestStream:
    """One live request's answer; made when the request is admitted."""

    def __init__(
        self,
        request_id: str,
        arrival: float,
        n: int,
        terminators: frozenset[int],
        detokenizer: Callable[[], Detokenizer] | None,
        stop_strings: StopStrings | None,
        readers: Readers,
    ) -> None:
        self.request_id = request_id
        self.arrival = arrival  # time.monotonic()
        self.last_tokens_at: dict[int, float] = {}
        """When each completion last got tokens, for metrics; time.monotonic()."""
        self._terminators = terminators
        self._completions = [
            Completion(
                index,
                detokenizer() if detokenizer else None,
                StopMatcher(stop_strings) if stop_strings else None,
            )
            for index in range(n)
        ]
        self._unfinished = n
        self._changed: dict[int, Completion] = {}  # has something to take, in order of arrival
        self.error: ServiceError | None = None
        self.reader: asyncio.Task[object] | None = None
        """The RPC's task, to be cancelled when it hangs in a write."""
        self._waiter: asyncio.Future[None] | None = None
        self._readers = readers
        self._taken_at: float | None = None

    # The loop's side

    @property
    def ended(self) -> bool:
        """All completions are finished, or the request has failed."""
        return self._unfinished == 0 or self.error is not None

    @property
    def begun(self) -> bool:
        """It has had tokens, so that nobody may send the request again unasked."""
        return bool(self.last_tokens_at)

    def push(self, event: Tokens) -> str | None:
        """Take new tokens; returns the stop string that they completed, if they did."""
        completion = self._completions[event.index]
        if self.error is not None or completion.finished or completion.stop_string:
            return None
        found = completion.push(event, self._terminators)
        self._wake(completion)
        return found

    def finish(self, event: Finished) -> None:
        """One completion has ended well."""
        completion = self._completions[event.index]
        if self.error is None and completion.finished is None:
            completion.finish(event)
            self._unfinished -= 1
            self._wake(completion)

    def fail(self, error: ServiceError) -> None:
        """The request has ended badly."""
        if not self.ended:
            self.error = error
            self._wake()

    def stalled_s(self, now: float) -> float:
        """How long the reader has been busy with what it took last; `now` of the loop's clock."""
        return 0.0 if self._taken_at is None else now - self._taken_at

    def _wake(self, completion: Completion | None = None) -> None:
        if completion is not None:
            self._changed[completion.index] = completion
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self._readers.wake(waiter)

    # The reader's side

    async def take(self) -> list[pb.GenerateResponse]:
        """What is new, waiting for it; empty when all has been taken. Raises the request's error."""
        self._taken_at = None
        while not self._changed:
            if self.error is not None:
                raise self.error
            if self._unfinished == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        changed, self._changed = self._changed, {}
        self._taken_at = time.monotonic()
        if len(changed) == 1:
            return next(iter(changed.values())).take()
        return [message for completion in changed.values() for message in completion.take()]
