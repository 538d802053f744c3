"""`JsonCallParser`: what the parsers of calls that are JSON objects have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from typing import ClassVar

from scheduler_service.chat.call_object import CallObject
from scheduler_service.chat.events import CallBegins, Event
from scheduler_service.chat.json_scanner import WHITE_SPACE
from scheduler_service.chat.marked_text import MarkedTextParser


class JsonCallParser(MarkedTextParser):
    """Implements `CallParser`, with the places of a format: `text`, `object`, and those that a subclass adds.

    A subclass says what white space, an object and markers mean in its places.
    """

    reasons = False
    START = "text"
    """The place where the text begins."""
    BEHIND_OBJECT = "text"
    """The place after an object that is a call."""
    OPEN = frozenset[str]()
    """Places where an object is a call."""
    BEHIND_CALL = frozenset[str]()
    """Places after a call, where white space belongs to it."""
    SEPARATORS: ClassVar[Mapping[tuple[str, str], str]] = {}
    """The place after a place and a character that may follow there without being an object."""

    def __init__(self, names: Container[str], markers: Sequence[str], *, by_id: bool) -> None:
        """`names` of the tools that may be called. `by_id`: markers come by `marker`, not in the text."""
        super().__init__(markers, by_id=by_id)
        self._names = names
        self._place = self.START
        self._object = CallObject(names)  # if the place is `object`
        self._held = ""
        """What came since the last event: text, unless a call comes of it."""

    def marker(self, marker: str) -> Iterator[Event]:
        """As `CallParser.marker`."""
        if self._place == "object":
            if self._object.in_string:
                yield from self._text(marker)
                return
            yield from self._give_up(self._object.unsent)
        yield from self._marked(marker)

    def flush(self) -> Iterator[Event]:
        """As `CallParser.flush`."""
        yield from self._flush_markers()
        rest = self._object.unsent if self._place == "object" else ""
        if self._place in self.BEHIND_CALL or (self._place == "object" and self._object.begun):
            self._held, rest = "", rest.strip(WHITE_SPACE)
        yield from self._give_up(rest)

    def _text(self, text: str) -> Iterator[Event]:
        while text:
            if self._place == "object":
                text = yield from self._in_object(text)
                continue
            if self._place == "text":
                yield text
                return
            bare = text.lstrip(WHITE_SPACE)
            self._held += text[: len(text) - len(bare)]
            if bare and bare[0] == "{" and self._place in self.OPEN:
                self._place, self._object = "object", CallObject(self._names)
            elif bare and (place := self.SEPARATORS.get((self._place, bare[0]))):
                is_behind = place in self.BEHIND_CALL  # then the character belongs to the calls before it
                self._held, bare = "" if is_behind else self._held + bare[0], bare[1:]
                self._place = place
            elif bare:
                yield from self._give_up("")
            text = bare

    def _in_object(self, text: str) -> Generator[Event, None, str]:
        """Take more of an object; returns the text after it."""
        events, rest = self._object.push(text)
        for event in events:
            if isinstance(event, CallBegins):
                self._held = ""
            yield event
        if self._object.failed:
            yield from self._give_up("")
        elif self._object.done:
            self._place = self.BEHIND_OBJECT
        return rest

    def _give_up(self, rest: str) -> Iterator[Event]:
        """What was held is text, and `rest` after it."""
        text, self._held, self._place = self._held + rest, "", "text"
        if text:
            yield text

    @abstractmethod
    def _marked(self, marker: str) -> Iterator[Event]:
        """Take a marker outside of objects."""
