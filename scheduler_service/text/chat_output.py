"""`ChatOutput`: the token ids of one completion of a chat to its reasoning, its text and its calls.

A detokenizer; after it, reasoning is split from the answer, then calls are found in the answer, then stop
strings in what is left, the text. Markers that are tokens are matched by their ids. Any split of the ids
gives the same output.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence

from scheduler_service.chat.events import CallBegins, CallParser, CallPiece, Event, Reasoning
from scheduler_service.chat.reading import ChatReading
from scheduler_service.chat.reasoning import Thinking
from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.plain_output import PlainOutput
from scheduler_service.text.stop_strings import StopMatcher


class _ChatPart(enum.Enum):
    UNDECIDED = 0  # reasoning may begin; there was nothing but white space
    REASONING = 1
    ANSWER = 2


_START = {
    Thinking.INSIDE: _ChatPart.REASONING,
    Thinking.POSSIBLE: _ChatPart.UNDECIDED,
    Thinking.OFF: _ChatPart.ANSWER,
}


class ChatOutput(PlainOutput):
    """Line breaks beside the markers around the reasoning belong to the markers."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None,
        reading: ChatReading,
        call_id: Callable[[int], str],
        *,
        include_stop_string: bool,
    ) -> None:
        """`call_id`: the id of the completion's call of this index."""
        super().__init__(detokenizer, matcher, include_stop_string=include_stop_string)
        self.calls: list[CallPiece] = []
        self._place = _START[reading.thinking]
        self._markers = reading.reasoning
        self._call_markers = {} if reading.tool_format is None else reading.tool_format.markers
        reserved = set(self._call_markers)
        if reading.reasoning is not None:
            reserved |= {reading.reasoning.begin, reading.reasoning.end}
        self._reserved = frozenset(reserved)
        self._parser: CallParser | None = None
        if reading.tool_format is not None:
            self._parser = reading.tool_format.parser(reading.tools)
        self._call_id = call_id
        self._call_count = 0
        self._held = ""  # white space that may be before the reasoning; line breaks that may be after it
        self._is_start = self._place is _ChatPart.REASONING
        """Of the reasoning, or of the answer after it: line breaks are left out."""

    def push(self, ids: Iterable[int]) -> None:
        """As PlainOutput.push."""
        ids = tuple(ids)
        if self._reserved.isdisjoint(ids):
            self._push_run(ids)
            return
        start = 0
        for at, id_ in enumerate(ids):
            if id_ in self._reserved:
                self._push_run(ids[start:at])
                start = at + 1
                self._push_marker(id_)
        self._push_run(ids[start:])

    def flush(self) -> None:
        """As PlainOutput.flush; what may have become a call is text."""
        if self.stop_string is not None:
            return
        self._take(self._detokenizer.flush())
        held, self._held = self._held, ""
        if self._place is _ChatPart.REASONING:
            self.reasoning += held
            return
        if self._place is _ChatPart.UNDECIDED:
            self.reasoning_tokens = 0
        if self._parser is not None:
            self._take_events(self._parser.push(held))
            self._take_events(self._parser.flush())
        elif held:
            self._add(held)
        self._flush_matcher()

    def take(self) -> tuple[str, str, Sequence[CallPiece]]:
        """As PlainOutput.take."""
        taken = self.text, self.reasoning, self.calls
        self.text, self.reasoning, self.calls = "", "", []
        return taken

    def _push_run(self, ids: tuple[int, ...]) -> None:
        """Take ids of which none is a marker."""
        if ids and self.stop_string is None:
            if self._place is not _ChatPart.ANSWER or self._parser_reasons:
                self.reasoning_tokens += len(ids)
            self._take(self._detokenizer.push(ids))

    @property
    def _parser_reasons(self) -> bool:
        return self._parser is not None and self._parser.reasons

    def _push_marker(self, id_: int) -> None:
        """Take a marker's id, which is text where the marker has no meaning."""
        if self.stop_string is not None:
            return
        self._take(self._detokenizer.flush())
        if self._place is not _ChatPart.ANSWER:
            self.reasoning_tokens += 1
            if self._is_around_reasoning(id_):
                return
        if self._place is _ChatPart.UNDECIDED and id_ in self._call_markers:
            self._begin_answer()
        if self._place is _ChatPart.ANSWER and self._parser is not None and id_ in self._call_markers:
            reasoned = self._parser_reasons
            self._take_events(self._parser.marker(self._call_markers[id_]))
            self.reasoning_tokens += reasoned or self._parser_reasons
        else:
            self._take(self._detokenizer.push((id_,)))

    def _is_around_reasoning(self, id_: int) -> bool:
        """Begin or end the reasoning, if this id does so here."""
        markers = self._markers
        assert markers is not None
        if self._place is _ChatPart.REASONING and id_ == markers.end:
            self._place, self._held, self._is_start = _ChatPart.ANSWER, "", True
            return True
        begins = self._place is _ChatPart.UNDECIDED or (self._is_start and not self._held)
        if id_ == markers.begin and begins:
            self._place, self._held, self._is_start = _ChatPart.REASONING, "", True
            return True
        return False

    def _begin_answer(self) -> None:
        """There was no reasoning."""
        held, self._held = self._held, ""
        self._place, self._is_start, self.reasoning_tokens = _ChatPart.ANSWER, False, 0
        self._take(held)

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._place is _ChatPart.UNDECIDED:
            self._held += text  # which was white space before
            if text.strip():
                self._begin_answer()
            return
        if self._is_start:
            text = text.lstrip("\n")
            if not text:
                return
            self._is_start = False
        if self._place is _ChatPart.REASONING:
            body = text.rstrip("\n")
            if body:
                self.reasoning += self._held + body
                self._held = ""
            self._held += text[len(body) :]
        elif self._parser is not None:
            self._take_events(self._parser.push(text))
        else:
            self._add(text)

    def _take_events(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, str):
                self._add(event)
                if self.stop_string is not None:
                    return
            elif isinstance(event, Reasoning):
                self.reasoning += event.text
            elif isinstance(event, CallBegins):
                index, self._call_count = self._call_count, self._call_count + 1
                self.calls.append(CallPiece(index, self._call_id(index), event.name, ""))
            else:
                index = self._call_count - 1
                if not self.calls or self.calls[-1].index != index:
                    self.calls.append(CallPiece(index, "", "", ""))
                self.calls[-1].arguments += event.text
