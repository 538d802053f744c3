"""One request's answer on its way to its client.

The loop pushes tokens and ends in; one reader, the RPC's handler, takes output out, as plain data. What the
reader has not taken yet is merged: a slow reader gets fewer and larger deltas, and memory is bounded
by the request's own length. The stream ends exactly once, with all completions finished or with one
error; a push after that is ignored, for a step in flight may still bring tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_service.core.events import CompletionEnded, Tokens
from scheduler_service.core.step import TopLogprobs
from scheduler_service.errors import ServiceError, mismatch
from scheduler_service.streams.continuation import Continuation
from scheduler_service.streams.output import Output, OutputDelta, OutputEnd, OutputStart
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.stop_strings import StopMatcher, StopStrings

MAX_DELTA_TOKENS = 1024
"""With logprobs of 20 alternatives a message of so many stays far below 4 MiB."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Which parts of the output the client wants."""

    ids: bool = True  # and logprobs
    text: bool = True
    include_stop_string: bool = False


class CompletionBuffer:
    """One completion's tokens and text that wait for the reader."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer | None,
        matcher: StopMatcher | None,
        options: StreamOptions,
    ) -> None:
        self.index = index
        self.tokens_at: float | None = None  # when it last got tokens, whoever has taken them
        self._options = options
        self.finished: CompletionEnded | None = None
        self.is_over = False  # it was finished before this stream: nothing is sent for it
        self.stop_string: str | None = None
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._ids: list[int] = []
        self._text = ""
        self._logprobs: list[TopLogprobs] = []

    @property
    def has_news(self) -> bool:
        """Something waits for the reader."""
        return bool(self._ids or self._text)

    def push(self, event: Tokens, terminators: frozenset[int]) -> str | None:
        """Take new tokens; returns the stop string that they completed, if they did."""
        if self._options.ids:
            self._ids += event.ids
            if event.logprobs:
                self._logprobs += event.logprobs
        if self._detokenizer is not None:
            self._add_text(self._detokenizer, event.ids, terminators)
        return self.stop_string

    def take_over(self, ids: tuple[int, ...], text_bytes: int, terminators: frozenset[int]) -> str | None:
        """Begin behind output that the client has already: all of `ids`, and so much of their text.

        Returns the stop string that they completed, if they did. Raises ServiceError if their text
        is shorter, or `text_bytes` is no border of characters in it.
        """
        if self._detokenizer is None:
            return None
        if ids:
            self._add_text(self._detokenizer, ids, terminators)
        text = self._text.encode()
        if text_bytes > len(text):  # it had ended, so that what was held back was sent
            self._let_go()
            text = self._text.encode()
        if text_bytes > len(text) or (text_bytes < len(text) and text[text_bytes] & 0xC0 == 0x80):
            problem = f"has {len(text)} bytes of text here, and {text_bytes} is no border in it"
            raise mismatch("continuation.completions", f"completion {self.index} {problem}")
        self._text = text[text_bytes:].decode()
        return self.stop_string

    def _add_text(self, detokenizer: Detokenizer, ids: tuple[int, ...], terminators: frozenset[int]) -> None:
        # A terminator can only be the last token, and is no part of the text.
        text = detokenizer.push(ids[:-1] if ids[-1] in terminators else ids)
        if self._matcher is not None and text:
            text, self.stop_string = self._matcher.push(text)
            text = self._with_stop_string(text)
        self._text += text

    def _with_stop_string(self, text: str) -> str:
        return text + self.stop_string if self.stop_string and self._options.include_stop_string else text

    def finish(self, event: CompletionEnded) -> None:
        """Nothing follows: let go of what was held back."""
        self.finished = event
        self._let_go()

    def _let_go(self) -> None:
        if self._detokenizer is not None and self.stop_string is None:
            text = self._detokenizer.flush()
            if self._matcher is not None:
                text, self.stop_string = self._matcher.push(text)
                text += "" if self.stop_string else self._matcher.flush()
            self._text += self._with_stop_string(text)

    def take(self, arrival: float) -> list[Output]:
        """All that waits; the last one is the end if there is one. `arrival`: of the request."""
        ids, text, logprobs = self._ids, self._text, self._logprobs
        if not self._options.text:
            text = ""
        pieces: list[Output] = []
        if ids or text:
            elapsed_s = 0.0 if self.tokens_at is None else self.tokens_at - arrival
            self._ids, self._text, self._logprobs = [], "", []
            if len(ids) <= MAX_DELTA_TOKENS:
                pieces.append(OutputDelta(self.index, ids, text, logprobs, elapsed_s))
            else:  # the text goes with the last piece: it may lag behind the ids, never lead them
                for start in range(0, len(ids), MAX_DELTA_TOKENS):
                    end = start + MAX_DELTA_TOKENS
                    tail = text if end >= len(ids) else ""
                    piece = OutputDelta(self.index, ids[start:end], tail, logprobs[start:end], elapsed_s)
                    pieces.append(piece)
        if self.finished is not None:
            pieces.append(OutputEnd(self.index, self.finished, self.stop_string))
        return pieces


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
        core_id: str,
        arrival: float,
        n: int,
        terminators: frozenset[int],
        detokenizer: Callable[[], Detokenizer] | None,
        stop_strings: StopStrings | None,
        readers: Readers,
        options: StreamOptions | None = None,
    ) -> None:
        self.request_id = request_id  # the caller's
        self.core_id = core_id  # the core's, of which no two are equal
        self.arrival = arrival  # time.monotonic()
        self.cached_tokens = 0  # of the prompt, found in the prefix cache; known with the first tokens
        self.begin: Callable[[RequestStream], OutputStart] | None = None
        """Makes what goes before all else; None: it was taken."""
        self.digest = b""  # of the request's bytes
        self._terminators = terminators
        options = options or StreamOptions()
        self.completions = [
            CompletionBuffer(
                index,
                detokenizer() if detokenizer else None,
                StopMatcher(stop_strings) if stop_strings else None,
                options,
            )
            for index in range(n)
        ]
        self._unfinished = n
        self._changed: dict[int, CompletionBuffer] = {}  # has something to take, in order of arrival
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
    def taken(self) -> bool:
        """The client has been sent something, so that the request must not be retried blindly."""
        return self.begin is None

    def push(self, event: Tokens) -> str | None:
        """Take new tokens; returns the stop string that they completed, if they did."""
        completion = self.completions[event.index]
        if self.error is not None or completion.finished or completion.stop_string:
            return None
        found = completion.push(event, self._terminators)
        self._wake(completion)
        return found

    def take_over(self, continuation: Continuation) -> list[int]:
        """Begin behind what the client has already; the completions whose stop string was in it.

        Before anything is pushed. Raises ServiceError.
        """
        stopped = []
        for one, text_bytes in zip(continuation.completions, continuation.text_bytes, strict=True):
            completion = self.completions[one.index]
            if one.finished:
                self._unfinished -= 1
                completion.is_over = True
                continue
            if completion.take_over(one.ids, text_bytes, self._terminators):
                stopped.append(one.index)
            if completion.has_news:
                self._changed[one.index] = completion
        return stopped

    def finish(self, event: CompletionEnded) -> None:
        """One completion has ended well."""
        completion = self.completions[event.index]
        if self.error is None and completion.finished is None and not completion.is_over:
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

    def _wake(self, completion: CompletionBuffer | None = None) -> None:
        if completion is not None:
            self._changed[completion.index] = completion
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self._readers.wake(waiter)

    # The reader's side

    async def take(self) -> list[Output]:
        """What is new, waiting for it; empty when all has been taken. Raises the request's error."""
        self._taken_at = None
        while True:
            while not self._changed:
                if self.error is not None:
                    raise self.error
                if self._unfinished == 0:
                    return []
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            changed, self._changed = self._changed, {}
            if len(changed) == 1:
                pieces = next(iter(changed.values())).take(self.arrival)
            else:
                pieces = [piece for completion in changed.values() for piece in completion.take(self.arrival)]
            if self.begin is not None and pieces:
                pieces.insert(0, self.begin(self))
                self.begin = None
            if pieces:  # none: text is held back, and the client wants no ids
                self._taken_at = time.monotonic()
                return pieces
