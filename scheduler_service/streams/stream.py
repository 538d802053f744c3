"""The output of one request on its way to its client.

The loop pushes tokens and ends; one reader, the RPC's handler, takes output, as plain data. Output that the
reader has not taken is merged, so that a slow reader gets fewer and larger deltas, and memory is bounded by
the request's length. The stream ends exactly once, with all completions finished or with one error; a push
after that is ignored, since a step in flight may still bring tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from scheduler_service.chat.reading import ChatReading
from scheduler_service.core.events import CompletionEnded, CompletionUsage, PromptScores, Tokens
from scheduler_service.core.step import ScoredTokens
from scheduler_service.errors import ServiceError
from scheduler_service.streams.completion import MAX_DELTA_TOKENS, CompletionBuffer
from scheduler_service.streams.continuation import Continuation
from scheduler_service.streams.output import Output, OutputStart, PromptOutput
from scheduler_service.streams.request import ChatPrompt, CheckedRequest
from scheduler_service.text.chat_output import ChatOutput
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.plain_output import PlainOutput
from scheduler_service.text.stop_strings import StopMatcher, StopStrings
from scheduler_service.text.vocabulary import Vocabulary
from scheduler_service.traced_call import TracedCall


class WakeQueue:
    """Wakes the readers of all streams a few at a time, so that the loop can run between them.

    A write costs as much as all other work for a token. When the event loop can't keep up, it sends the next
    step before it wakes the readers left in this queue, which then get more tokens in one message.
    """

    AT_ONCE = 4
    """Readers woken in one iteration of the event loop."""

    def __init__(self) -> None:
        self._readers: deque[asyncio.Future[None]] = deque()

    def add(self, reader: asyncio.Future[None]) -> None:
        """Set this future's result, which its reader awaits, after those of the readers added before."""
        if not self._readers:
            reader.get_loop().call_soon(self._wake_some)
        self._readers.append(reader)

    def _wake_some(self) -> None:
        """Wake the first AT_ONCE readers; schedule itself again if others are left."""
        readers = self._readers
        for _ in range(min(self.AT_ONCE, len(readers))):
            reader = readers.popleft()
            if not reader.done():  # else its task was cancelled
                reader.set_result(None)
        if readers:
            readers[0].get_loop().call_soon(self._wake_some)


class RequestStream:
    """The output of one live request, from its admission on.

    `vocabulary`: of the served model; None if it has no tokenizer, and the output has no text.
    """

    def __init__(
        self,
        checked: CheckedRequest,
        core_id: str,
        identity: str,
        arrival: float,
        vocabulary: Vocabulary | None,
        wake_queue: WakeQueue,
        reading: ChatReading | None = None,
    ) -> None:
        """`reading`: of a chat whose output may have other than text."""
        self.request_id = checked.id  # the caller's; two callers may use the same one
        self.core_id = core_id  # the core's, unique
        self.identity = identity  # the caller's
        self.arrival = arrival  # in seconds on the registry's clock
        self.method = "Generate"  # that was called
        self.operation = "chat" if isinstance(checked.prompt, ChatPrompt) else "text_completion"
        self.model = ""  # name of the model, or of the adapter
        self.prompt_tokens = 0
        self.cached_tokens = 0  # prefix hit of the prompt; set with the first tokens
        self.make_start: Callable[[RequestStream], OutputStart] | None = None
        """Makes the first output; None once the reader has taken it."""
        self.labels = checked.labels  # for the log
        self.digest = checked.digest  # of the request's bytes; empty: a resend can't be recognized
        self.grammar_field, self.warnings = checked.grammar_field, checked.warnings
        self.returns_prompt = checked.output.prompt_ids
        self._terminators = checked.terminators
        strings = StopStrings(checked.stop_strings) if checked.stop_strings else None
        self.completions = [
            CompletionBuffer(
                index,
                None if vocabulary is None else _text_output(checked, index, vocabulary, strings, reading),
                checked.output,
            )
            for index in range(checked.n)
        ]
        self._scores: list[ScoredTokens] = []  # of the prompt, not taken yet
        self._unfinished = checked.n
        self._is_continuation = checked.continuation is not None
        self._changed: dict[int, CompletionBuffer] = {}  # those with new output by index, first change first
        self.error: ServiceError | None = None
        self.call: TracedCall | None = None  # whose spans are recorded
        self.reader: asyncio.Task[object] | None = None
        """The RPC's task, to be cancelled when its client stalls it in a write."""
        self._waiter: asyncio.Future[None] | None = None  # what the reader awaits in `take`
        self._wake_queue = wake_queue
        self._taken_at: float | None = None  # time of the last `take` that returned output; None: in `take`

    # Called by the registry

    @property
    def ended(self) -> bool:
        """All completions are finished, or the request has failed."""
        return self._unfinished == 0 or self.error is not None

    @property
    def taken(self) -> bool:
        """The reader has taken output. The client may have it, so the request must not be retried blindly."""
        return self.make_start is None

    @property
    def finished_here(self) -> Iterator[CompletionUsage]:
        """The usage of completions that have finished; none of a stream that began on another scheduler."""
        if not self._is_continuation:
            yield from (one.finished.usage for one in self.completions if one.finished is not None)

    def push(self, event: Tokens) -> str | None:
        """Append new tokens of a completion; returns the stop string that their text completes, or None."""
        completion = self.completions[event.index]
        if self.error is not None or completion.finished or completion.stop_string:
            return None
        found = completion.push(event, self._terminators)
        self._wake(completion)
        return found

    def push_scores(self, event: PromptScores) -> None:
        """Append logprobs of the prompt, which come before its first tokens."""
        if self.error is None:
            self._scores.append(event.scores)
            self._wake()

    def continue_after(self, continuation: Continuation) -> list[int]:
        """Begin after the output that the client has received. Call it before the first `push`.

        Returns the indices of the completions whose text so far contains a stop string. Raises ServiceError
        if the text received is not the text of the tokens received.
        """
        stopped = []
        for one, received in zip(continuation.completions, continuation.received, strict=True):
            completion = self.completions[one.index]
            if one.finished:
                self._unfinished -= 1
                completion.finished_before = True
                continue
            if completion.continue_after(one.ids, received, self._terminators):
                stopped.append(one.index)
            if completion.has_output:
                self._changed[one.index] = completion
        return stopped

    def finish(self, event: CompletionEnded) -> None:
        """A completion has finished."""
        completion = self.completions[event.index]
        if self.error is None and completion.finished is None and not completion.finished_before:
            completion.finish(event)
            self._unfinished -= 1
            self._wake(completion)

    def fail(self, error: ServiceError) -> None:
        """The request has failed. No effect after the stream's end."""
        if not self.ended:
            self.error = error
            self._wake()

    def stalled_s(self, now: float) -> float:
        """Seconds since the reader took its last output, which it is still writing; else 0."""
        return 0.0 if self._taken_at is None else now - self._taken_at

    def _wake(self, completion: CompletionBuffer | None = None) -> None:
        if completion is not None:
            self._changed[completion.index] = completion
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self._wake_queue.add(waiter)

    # Called by the reader

    async def take(self) -> list[Output]:
        """Wait for output, remove and return it; empty at the stream's end. Raises the request's error."""
        self._taken_at = None
        while True:
            while not (self._changed or self._scores):
                if self.error is not None:
                    raise self.error
                if self._unfinished == 0:
                    return []
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            changed, self._changed = self._changed, {}
            if len(changed) == 1:
                outputs = next(iter(changed.values())).take(self.arrival)
            else:
                outputs = [one for completion in changed.values() for one in completion.take(self.arrival)]
            if self._scores:
                scores, self._scores = self._scores, []
                outputs[:0] = [PromptOutput(p) for part in scores for p in part.parts(MAX_DELTA_TOKENS)]
            if self.make_start is not None and outputs:
                outputs.insert(0, self.make_start(self))
                self.make_start = None
            if outputs:  # empty if the text is held back, and the client wants no ids
                self._taken_at = time.monotonic()
                return outputs


def _text_output(
    checked: CheckedRequest,
    index: int,
    vocabulary: Vocabulary,
    strings: StopStrings | None,
    reading: ChatReading | None,
) -> PlainOutput:
    """What makes the text of a request's completion `index`."""
    detokenizer = Detokenizer(vocabulary)
    matcher = StopMatcher(strings) if strings is not None else None
    shows_stop_string = checked.output.include_stop_string
    if reading is None:
        return PlainOutput(detokenizer, matcher, include_stop_string=shows_stop_string)
    short = reading.tool_format is not None and reading.tool_format.short_ids
    ids = partial(call_id, checked.id, index, short=short)
    return ChatOutput(detokenizer, matcher, reading, ids, include_stop_string=shows_stop_string)


def call_id(request_id: str, completion: int, call: int, *, short: bool = False) -> str:
    """A tool call's id: the same on every scheduler that continues the request. `short`: of 9 characters."""
    name = f"{request_id} {completion} {call}"
    digest = hashlib.sha256(name.encode()).hexdigest()
    return digest[:9] if short else f"call_{digest[:24]}"
