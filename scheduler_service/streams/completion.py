"""The output of one completion that its stream's reader has not taken yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler_service.chat.events import CallPiece
from scheduler_service.core.events import CompletionEnded, Tokens
from scheduler_service.core.step import TopLogprobs
from scheduler_service.errors import mismatch
from scheduler_service.streams.continuation import ReceivedText, remove_received
from scheduler_service.streams.output import Output, OutputDelta, OutputEnd
from scheduler_service.streams.request import StreamOptions
from scheduler_service.text.plain_output import PlainOutput

MAX_DELTA_TOKENS = 1024
"""Tokens of one delta. Its message stays far below 4 MiB even with 20 alternatives for each token."""
_NO_TEXT: tuple[str, str, Sequence[CallPiece]] = ("", "", ())


class CompletionBuffer:
    """The tokens and text of one completion that the reader has not taken yet, merged."""

    def __init__(
        self,
        index: int,
        output: PlainOutput | None,
        options: StreamOptions,
    ) -> None:
        """`output` makes the text; None: the model has no tokenizer, and the output has no text."""
        self.index = index
        self.tokens_at: float | None = None
        """Time of the last tokens, in seconds on the registry's clock; None: there were none yet."""
        self.finished: CompletionEnded | None = None
        self.finished_before = False
        """It ended in the stream that this one continues: nothing is sent for it."""
        self._options = options
        self._output = output
        self._ids: list[int] = []
        self._logprobs: list[TopLogprobs] = []
        self._count = 0  # of output tokens, continued ones included; those after a stop string are none

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found in the text."""
        return None if self._output is None else self._output.stop_string

    @property
    def tokens(self) -> int:
        """Output tokens so far, those of the stream that this one continues included."""
        return self._count

    @property
    def has_output(self) -> bool:
        """There is output that the reader has not taken."""
        output = self._output
        return bool(self._ids or (output is not None and (output.text or output.reasoning or output.calls)))

    def push(self, event: Tokens, terminators: frozenset[int]) -> str | None:
        """Append new tokens; returns the stop string that their text completes, or None.

        Tokens after the one that completes it are dropped: a step may bring several. `terminators`: ids of
        end and stop tokens, which have no text.
        """
        count = len(event.ids) if self._output is None else self._push_text(self._output, event, terminators)
        self._count += count
        if self._options.ids:
            self._ids += event.ids[:count]
            if event.logprobs:
                self._logprobs += event.logprobs[:count]
        return self.stop_string

    def _push_text(self, output: PlainOutput, event: Tokens, terminators: frozenset[int]) -> int:
        """Append the text of new tokens; returns how many there are up to the end of a stop string.

        Text is made even if the client wants none, to find stop strings.
        """
        ids = event.ids
        # A terminator ends the completion, so only the last id can be one.
        spoken = ids[:-1] if ids[-1] in terminators else ids
        if not output.has_stop_strings:
            output.push(spoken)
            return len(ids)
        for count, id_ in enumerate(spoken, start=1):
            output.push((id_,))
            if output.stop_string is not None:
                return count
        return len(ids)

    def continue_after(
        self, ids: tuple[int, ...], received: ReceivedText, terminators: frozenset[int]
    ) -> str | None:
        """Begin after what the client has received: all of `ids`, and so much of their text.

        Returns the stop string that their text completes, or None. Raises ServiceError if their text is
        shorter, or the text received ends within a character.
        """
        output = self._output
        if output is None:
            return None
        self._count = len(ids)
        if ids:
            output.push(ids[:-1] if ids[-1] in terminators else ids)
        try:
            remove_received(output, received)
        except ValueError as error:
            raise mismatch("continuation.completions", f"completion {self.index} {error}") from None
        return output.stop_string

    def finish(self, event: CompletionEnded) -> None:
        """The completion has ended: no tokens follow."""
        if self._output is not None:
            self._output.flush()
        if self.stop_string is not None:  # the core may have counted tokens after it
            event = replace(event, usage=replace(event.usage, completion_tokens=self._count))
        self.finished = event

    def take(self, arrival: float) -> list[Output]:
        """Remove and return the output, with the end last if the completion has ended.

        `arrival`: time of the request's arrival, in seconds on the clock of `tokens_at`.
        """
        ids, logprobs, output = self._ids, self._logprobs, self._output
        text, reasoning, calls = _NO_TEXT if output is None else output.take()
        if not self._options.text:
            text, reasoning, calls = _NO_TEXT
        pieces: list[Output] = []
        if ids or text or reasoning or calls:
            elapsed_s = 0.0 if self.tokens_at is None else self.tokens_at - arrival
            self._ids, self._logprobs = [], []
            if len(ids) <= MAX_DELTA_TOKENS:
                pieces.append(OutputDelta(self.index, ids, text, logprobs, elapsed_s, reasoning, calls))
            else:  # the last delta has the text: text may be sent after its ids, never before
                last = (len(ids) - 1) // MAX_DELTA_TOKENS * MAX_DELTA_TOKENS
                for start in range(0, last, MAX_DELTA_TOKENS):
                    end = start + MAX_DELTA_TOKENS
                    pieces.append(OutputDelta(self.index, ids[start:end], "", logprobs[start:end], elapsed_s))
                pieces.append(
                    OutputDelta(self.index, ids[last:], text, logprobs[last:], elapsed_s, reasoning, calls)
                )
        if self.finished is not None:
            thought = 0 if output is None else output.reasoning_tokens
            pieces.append(OutputEnd(self.index, self.finished, self.stop_string, thought))
        return pieces
