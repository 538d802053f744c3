"""`CallObject`: a call that is written as a JSON object with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Container

from scheduler_service.chat.events import Arguments, CallBegins, Event
from scheduler_service.chat.json_scanner import WHITE_SPACE, JsonScanner

_TEXTS = frozenset({"name", "type", "id"})
_ARGUMENTS = frozenset({"arguments", "parameters"})
KEYS = _TEXTS | _ARGUMENTS
"""Keys of a call."""


class CallObject:
    """`{"name": ..., "arguments": {...}}`, or with `parameters`; `type` and `id` may be beside them.

    Arguments are passed on as they come, if the name stands before them.
    """

    def __init__(self, names: Container[str], name: str | None = None) -> None:
        """`names` of the tools that may be called. `name`: of a call of which only the arguments follow."""
        self.done = False  # the object is complete
        self.failed = False  # it is no call, or no more
        self.begun = False  # the call's beginning has been passed on
        self._names = names
        self._is_bare = name is not None
        self._expected = "{" if name is None else "value"
        self._scanner: JsonScanner | None = None  # of the key or value that is being read
        self._read: list[str] = []  # its text, unless it is passed on
        self._key = "" if name is None else "arguments"
        self._name = name
        self._arguments: str | None = None  # if they stand before the name
        self._unsent: list[str] = []  # what was taken since the last event

    @property
    def unsent(self) -> str:
        """What was taken and is in no event: to be text, if the object ends here."""
        return "".join(self._unsent)

    @property
    def in_string(self) -> bool:
        """Any text may follow: this is the inside of a string."""
        return self._scanner is not None and self._scanner.in_string

    def push(self, text: str) -> tuple[list[Event], str]:
        """Take more of the object; returns events, and the text after it if it is done or has failed.

        If it has failed, that text begins with what is in no event.
        """
        events: list[Event] = []
        at = 0
        while at < len(text) and not (self.done or self.failed):
            at = self._structure(text, at, events) if self._scanner is None else self._scan(text, at, events)
        if self.failed:
            return events, self.unsent + text[at:]
        return events, text[at:]

    def _structure(self, text: str, at: int, events: list[Event]) -> int:
        """Take one character between keys and values, or begin one of them."""
        c, expected = text[at], self._expected
        if c in WHITE_SPACE:
            self._unsent.append(c)
            return at + 1
        if (expected == "key" and c == '"') or (expected == "value" and c == self._first_of_value()):
            if expected == "value" and self._key in _ARGUMENTS and self._name is not None:
                self._begin(self._name, events)
            self._scanner, self._read = JsonScanner(), []
            return at
        if c not in "{:,}" or c not in expected or (c == "}" and not self._end(events)):
            self.failed = True
            return at
        if c != "}":
            self._unsent.append(c)
            self._expected = "value" if c == ":" else "key"
        return at + 1

    def _first_of_value(self) -> str:
        """The character that a value of this key begins with; "": no such key may stand here."""
        if self._key in _TEXTS:
            return '"' if self._key != "name" or self._name is None else ""
        return "{" if self._key in _ARGUMENTS and not self.begun and self._arguments is None else ""

    def _scan(self, text: str, at: int, events: list[Event]) -> int:
        """Take what belongs to the key or value that is being read."""
        scanner = self._scanner
        assert scanner is not None
        end = scanner.push(text, at)
        piece = text[at:end]
        if self.begun and self._expected == "value" and self._key in _ARGUMENTS:
            if piece:
                events.append(Arguments(piece))
        else:
            self._read.append(piece)
            self._unsent.append(piece)
        self.failed = scanner.failed
        if scanner.done:
            self._scanner = None
            self._take_read()
        return end

    def _take_read(self) -> None:
        """A key or a value is complete."""
        read = "".join(self._read)
        if self._expected == "key":
            self._key, self._expected = json.loads(read), ":"
            return
        self._expected = ",}"
        if self._key in _ARGUMENTS:
            self._arguments, self.done = read, self._is_bare
        elif self._key == "name":
            self._name = json.loads(read)
            self.failed = self._name not in self._names

    def _begin(self, name: str, events: list[Event]) -> None:
        events.append(CallBegins(name))
        self.begun = True
        self._unsent.clear()

    def _end(self, events: list[Event]) -> bool:
        """The object is complete; returns False if it is no call, for want of a name or arguments."""
        if not self.begun:
            if self._name is None or self._arguments is None:
                return False
            self._begin(self._name, events)
            events.append(Arguments(self._arguments))
        self._unsent.clear()
        self.done = True
        return True
