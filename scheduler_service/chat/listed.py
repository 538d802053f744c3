"""Calls behind a marker: a list of JSON objects (Granite 3, Mistral), or names (newer Mistral)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import ClassVar

from scheduler_service.chat.call_object import CallObject
from scheduler_service.chat.events import Event
from scheduler_service.chat.json_calls import JsonCallParser
from scheduler_service.chat.json_scanner import WHITE_SPACE

GRANITE = "<|tool_call|>"
MISTRAL, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = GRANITE, MISTRAL, CALL_ID, ARGUMENTS


class ListedCallParser(JsonCallParser):
    """`MARKER[{"name": ..., "arguments": {...}}, ...]`."""

    BEHIND_OBJECT = "behind"
    OPEN = frozenset({"list"})
    BEHIND_CALL = frozenset({"behind", "closed"})
    SEPARATORS: ClassVar = {
        ("opened", "["): "list",
        ("behind", ","): "list",
        ("behind", "]"): "closed",
    }
    MARKERS: ClassVar[tuple[str, ...]] = (GRANITE,)

    def __init__(self, names: Container[str], *, by_id: bool) -> None:
        """As JsonCallParser."""
        super().__init__(names, self.MARKERS, by_id=by_id)

    def _marked(self, marker: str) -> Iterator[Event]:
        if self._place in self.BEHIND_CALL:
            self._held = ""
        yield from self._give_up("")
        self._held, self._place = marker, "opened"


class MistralParser(ListedCallParser):
    """A list, or calls `[TOOL_CALLS]NAME[CALL_ID]...[ARGS]{...}`, of which each has its own first marker."""

    MARKERS: ClassVar = (MISTRAL, CALL_ID, ARGUMENTS)
    LONGEST_HEAD = 256  # characters of a name and an id; what is longer is text

    def __init__(self, names: Container[str], *, by_id: bool) -> None:
        """As JsonCallParser."""
        super().__init__(names, by_id=by_id)
        self._tools = names
        self._tool = ""

    def _text(self, text: str) -> Iterator[Event]:
        if self._place == "opened" and text.lstrip(WHITE_SPACE)[:1] not in ("", "["):
            self._place = "head"
        if self._place != "head":
            yield from super()._text(text)
            return
        self._held += text
        if len(self._held) > self.LONGEST_HEAD:
            yield from self._give_up("")

    def _marked(self, marker: str) -> Iterator[Event]:
        if marker == MISTRAL:
            self._tool = ""
            yield from super()._marked(marker)
            return
        if self._place == "head":
            if not self._tool:
                self._tool = self._held.removeprefix(MISTRAL).strip(WHITE_SPACE)
            self._held += marker
            if marker == CALL_ID:
                return
            tool, self._tool = self._tool, ""
            if tool in self._tools:
                self._place, self._object = "object", CallObject(self._tools, tool)
                return
            marker = ""
        yield from self._give_up(marker)
