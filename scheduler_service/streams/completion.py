"""The output of one completion that its stream's reader has not taken yet."""

from __future__ import annotations

from scheduler_service.core.events import CompletionEnded, Tokens
from scheduler_service.core.step import TopLogprobs
from scheduler_service.errors import mismatch
from scheduler_service.streams.output import Output, OutputDelta, OutputEnd
from scheduler_service.streams.request import StreamOptions
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.stop_strings import StopMatcher

MAX_DELTA_TOKENS = 1024
"""Tokens of one delta. Its message stays far below 4 MiB even with 20 alternatives for each token."""


class CompletionBuffer:
    """The tokens and text of one completion that the reader has not taken yet, merged."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer | None,
        matcher: StopMatcher | None,
        options: StreamOptions,
    ) -> None:
        self.index = index
        self.tokens_at: float | None = None
        """Time of the last tokens, in seconds on the registry's clock; None: there were none yet."""
        self.finished: CompletionEnded | None = None
        self.finished_before = False
        """It ended in the stream that this one continues: nothing is sent for it."""
        self.stop_string: str | None = None
        """The stop string that was found in the text."""
        self._options = options
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._ids: list[int] = []
        self._text = ""
        self._logprobs: list[TopLogprobs] = []

    @property
    def has_output(self) -> bool:
        """There are tokens or text that the reader has not taken."""
        return bool(self._ids or self._text)

    def push(self, event: Tokens, terminators: frozenset[int]) -> str | None:
        """Append new tokens; returns the stop string that their text completes, or None.

        `terminators`: ids of end and stop tokens, which have no text.
        """
        if self._options.ids:
            self._ids += event.ids
            if event.logprobs:
                self._logprobs += event.logprobs
        if self._detokenizer is not None:
            self._add_text(self._detokenizer, event.ids, terminators)
        return self.stop_string

    def continue_after(
        self, ids: tuple[int, ...], text_bytes: int, terminators: frozenset[int]
    ) -> str | None:
        """Begin after what the client has received: all of `ids`, and `text_bytes` UTF-8 bytes of their text.

        Returns the stop string that their text completes, or None. Raises ServiceError if their text has
        fewer bytes, or the text received ends within a character.
        """
        if self._detokenizer is None:
            return None
        if ids:
            self._add_text(self._detokenizer, ids, terminators)
        text = self._text.encode()
        if text_bytes > len(text):  # the client received the end too, before which all text is sent
            self._flush()
            text = self._text.encode()
        if text_bytes > len(text) or (text_bytes < len(text) and text[text_bytes] & 0xC0 == 0x80):
            problem = f"has {len(text)} bytes of text here, and {text_bytes} is no border in it"
            raise mismatch("continuation.completions", f"completion {self.index} {problem}")
        self._text = text[text_bytes:].decode()
        return self.stop_string

    def _add_text(self, detokenizer: Detokenizer, ids: tuple[int, ...], terminators: frozenset[int]) -> None:
        """Detokenize `ids`, at least one, and append the text that can't be part of a stop string any more.

        Text is made even if the client wants none, to find stop strings.
        """
        # An end or stop token (`terminators`) ends the completion, so only the last id can be one.
        text = detokenizer.push(ids[:-1] if ids[-1] in terminators else ids)
        if self._matcher is not None and text:
            text, self.stop_string = self._matcher.push(text)
            text = self._with_stop_string(text)
        self._text += text

    def _with_stop_string(self, text: str) -> str:
        return text + self.stop_string if self.stop_string and self._options.include_stop_string else text

    def finish(self, event: CompletionEnded) -> None:
        """The completion has ended: no tokens follow."""
        self.finished = event
        self._flush()

    def _flush(self) -> None:
        """Append the text that was held back: an unfinished character, a possible start of a stop string."""
        if self._detokenizer is not None and self.stop_string is None:
            text = self._detokenizer.flush()
            if self._matcher is not None:
                text, self.stop_string = self._matcher.push(text)
                text += "" if self.stop_string else self._matcher.flush()
            self._text += self._with_stop_string(text)

    def take(self, arrival: float) -> list[Output]:
        """Remove and return the output, with the end last if the completion has ended.

        `arrival`: time of the request's arrival, in seconds on the clock of `tokens_at`.
        """
        ids, text, logprobs = self._ids, self._text, self._logprobs
        if not self._options.text:
            text = ""
        pieces: list[Output] = []
        if ids or text:
            elapsed_s = 0.0 if self.tokens_at is None else self.tokens_at - arrival
            self._ids, self._text, self._logprobs = [], "", []
            if len(ids) <= MAX_DELTA_TOKENS:
                pieces.append(OutputDelta(self.index, ids, text, logprobs, elapsed_s))
            else:  # the last delta has the text: text may be sent after its ids, never before
                for start in range(0, len(ids), MAX_DELTA_TOKENS):
                    end = start + MAX_DELTA_TOKENS
                    tail = text if end >= len(ids) else ""
                    piece = OutputDelta(self.index, ids[start:end], tail, logprobs[start:end], elapsed_s)
                    pieces.append(piece)
        if self.finished is not None:
            pieces.append(OutputEnd(self.index, self.finished, self.stop_string))
        return pieces
