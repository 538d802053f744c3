"""Calls as Llama 3 models write them: `{"name": ..., "parameters": {...}}`, with `; ` between several."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import ClassVar

from scheduler_service.chat.events import Event
from scheduler_service.chat.json_calls import JsonCallParser

TAG = "<|python_tag|>"


class LlamaJsonParser(JsonCallParser):
    """Calls where the answer begins, or after a tag."""

    START = "open"
    BEHIND_OBJECT = "behind"
    OPEN = frozenset({"open", "behind", "between"})
    BEHIND_CALL = frozenset({"behind"})
    SEPARATORS: ClassVar = {("behind", ";"): "between"}

    def __init__(self, names: Container[str], *, by_id: bool) -> None:
        """As JsonCallParser."""
        super().__init__(names, (TAG,), by_id=by_id)

    def _marked(self, marker: str) -> Iterator[Event]:
        if self._place in self.BEHIND_CALL:
            self._held = ""
        yield from self._give_up("")
        self._held, self._place = marker, "open"
