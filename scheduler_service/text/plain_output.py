"""`PlainOutput`: the token ids of one completion to the text that its client gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_service.chat.events import CallPiece
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.stop_strings import StopMatcher


class PlainOutput:
    """A detokenizer, and stop strings after it."""

    reasoning = ""
    calls: Sequence[CallPiece] = ()
    reasoning_tokens = 0
    """Tokens before the answer, markers included."""

    def __init__(
        self, detokenizer: Detokenizer, matcher: StopMatcher | None, *, include_stop_string: bool
    ) -> None:
        self.text = ""
        self.stop_string: str | None = None
        """The stop string that was found in the text: nothing may be pushed any more."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._shows_stop_string = include_stop_string

    @property
    def has_stop_strings(self) -> bool:
        """The text may end it."""
        return self._matcher is not None

    def push(self, ids: Iterable[int]) -> None:
        """Append the text of `ids` that can't be part of a stop string any more."""
        text = self._detokenizer.push(ids)
        if self._matcher is None:
            self.text += text
        else:
            self._add(text)

    def flush(self) -> None:
        """Append the text that was held back: an unfinished character, a possible start of a stop string."""
        if self.stop_string is None:
            self._add(self._detokenizer.flush())
            self._flush_matcher()

    def take(self) -> tuple[str, str, Sequence[CallPiece]]:
        """Remove and return the text, the reasoning and the calls; later pushes change none of it."""
        text, self.text = self.text, ""
        return text, "", ()

    def _flush_matcher(self) -> None:
        if self._matcher is not None and self.stop_string is None:
            self.text += self._matcher.flush()

    def _add(self, text: str) -> None:
        if self._matcher is not None and text:
            text, self.stop_string = self._matcher.push(text)
            if self.stop_string and self._shows_stop_string:
                text += self.stop_string
        self.text += text
