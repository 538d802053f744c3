"""Calls as a list in Python's syntax: `[f(a=1, b="x"), g()]`, of Llama 3.2 and others."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NoReturn

from scheduler_service.chat.events import Arguments, CallBegins, Event
from scheduler_service.chat.json_scanner import MAX_DEPTH, WHITE_SPACE
from scheduler_service.chat.python_literal import literal_as_json

_MAX_NAME = 64  # characters
_CLOSE = {"[": "]", "(": ")", "{": "}"}


class PythonicParser:
    """Implements `CallParser`: one list, where the answer begins. Arguments come one by one, as JSON."""

    reasons = False

    def __init__(self, names: Container[str]) -> None:
        """`names` of the tools that may be called."""
        self._names = names
        self._place = "start"
        self._held: list[str] = []  # what came since the last event: text, if it ends here
        self._word: list[str] = []  # the name or the value that is being read
        self._tool = ""  # of this call; "": its beginning has been passed on
        self._keys: dict[str, None] = {}  # of this call, in order
        self._key = ""  # of the value that is being read
        self._open: list[str] = []  # in a value: closing brackets to come
        self._quote = ""  # in a string within a value: its quotation mark
        self._escaped = False

    def push(self, text: str) -> Iterator[Event]:
        """As `CallParser.push`."""
        for at, c in enumerate(text):
            if self._place == "text":
                yield text[at:]
                return
            try:
                events = self._in_value(c) if self._place == "value" else self._outside(c)
            except ValueError:
                yield self._given_up() + text[at:]
                return
            if events is not None:
                self._held.clear()
                yield from events
            if events is None or self._place == "key":  # an argument's event does not say the comma after it
                self._held.append(c)

    def marker(self, marker: str) -> Iterator[Event]:
        """As `CallParser.marker`; the format has none."""
        return self.push(marker)

    def flush(self) -> Iterator[Event]:
        """As `CallParser.flush`."""
        is_over = self._place == "behind"
        if (text := self._given_up()) and not is_over:
            yield text

    def _given_up(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        self._place = "text"
        return text

    def _outside(self, c: str) -> list[Event] | None:
        """Take a character that is in no value; returns events that say all there was until here, or None.

        Raises ValueError if it can't stand here.
        """
        if c in WHITE_SPACE and not self._word:
            return None
        events: list[Event] | None = None
        match self._place, c:
            case "start", "[":
                self._place = "name"
            case "name", "(":
                self._tool, self._keys = "".join(self._word), {}
                if self._tool not in self._names:
                    self._fail()
                self._place = "first key"
            case "first key", ")" if not self._word:
                events = self._argument("{}")
                self._place = "behind call"
            case "first key" | "key", "=" if self._word:
                key = "".join(self._word).rstrip(WHITE_SPACE)
                if not key.isidentifier() or key in self._keys:
                    self._fail()
                self._keys[key] = None
                self._key = key
                self._place = "value"
            case "name" | "first key" | "key", _ if len(self._word) < _MAX_NAME:
                if not (c.isalnum() or c in "_-" or (c in WHITE_SPACE and self._place != "name")):
                    self._fail()
                self._word.append(c)
                return None
            case "behind call", ",":
                self._place = "name"
            case "behind call", "]":
                self._place, events = "behind", []
            case _:
                self._fail()
        self._word.clear()
        return events

    def _in_value(self, c: str) -> list[Event] | None:
        """Take a character of a value, or after it; returns and raises as `_outside`."""
        if self._quote:
            if self._escaped or c == "\\":
                self._escaped = not self._escaped
            elif c == self._quote:
                self._quote = ""
        elif c in "'\"":
            self._quote = c
        elif c in _CLOSE:
            self._open.append(_CLOSE[c])
            if len(self._open) > MAX_DEPTH:
                self._fail()
        elif self._open and c in "])}":
            if c != self._open.pop():
                self._fail()
        elif not self._open and c in ",)":
            value = literal_as_json("".join(self._word))
            self._word.clear()
            self._place = "behind call" if c == ")" else "key"
            before = "{" if len(self._keys) == 1 else ", "
            return self._argument(f'{before}"{self._key}": {value}' + ("}" if c == ")" else ""))
        self._word.append(c)
        return None

    def _argument(self, text: str) -> list[Event]:
        begins: list[Event] = [CallBegins(self._tool)] if self._tool else []
        self._tool = ""
        return [*begins, Arguments(text)]

    def _fail(self) -> NoReturn:
        raise ValueError
