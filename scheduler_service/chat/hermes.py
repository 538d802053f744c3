"""Calls as Hermes and Qwen models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Container, Iterator

from scheduler_service.chat.events import Event
from scheduler_service.chat.json_calls import JsonCallParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """Any number of calls, with text before, between and after them."""

    BEHIND_OBJECT = "inside"
    OPEN = frozenset({"opened"})
    BEHIND_CALL = frozenset({"inside", "behind"})  # before and behind the end marker

    def __init__(self, names: Container[str], *, by_id: bool) -> None:
        """As JsonCallParser."""
        super().__init__(names, (BEGIN, END), by_id=by_id)

    def _marked(self, marker: str) -> Iterator[Event]:
        if marker == BEGIN:
            if self._place in self.BEHIND_CALL:  # the end marker may be missing
                self._held = ""
            yield from self._give_up("")
            self._held, self._place = marker, "opened"
        elif self._place == "inside":
            self._held, self._place = "", "behind"
        else:
            yield from self._give_up(marker)
