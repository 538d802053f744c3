"""`JsonScanner`: follows one JSON value through pieces of text, and stops at its end or where it is none."""

from __future__ import annotations

import re

WHITE_SPACE = " \t\n\r"
MAX_DEPTH = 128
"""Objects and arrays within one another; deeper ones are taken for malformed."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_DIGITS = {"0": "digits", "1": "digits"}
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {"0": "zero", "1": "digits"},
    "zero": {".": "point", "e": "e"},
    "digits": {**_DIGITS, ".": "point", "e": "e"},
    "point": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "e"},
    "e": {"0": "exponent", "1": "exponent", "+": "sign"},
    "sign": {"0": "exponent", "1": "exponent"},
    "exponent": {"0": "exponent", "1": "exponent"},
}
"""States within a number by the kind of the next character; 1 is any digit but 0, + any sign."""
_NUMBER_ENDS = frozenset({"zero", "digits", "fraction", "exponent"})
_KINDS = {"0": "0", **dict.fromkeys("123456789", "1"), ".": ".", "e": "e", "E": "e", "+": "+", "-": "+"}


class JsonScanner:
    """One value that is an object, an array or a string (RFC 8259), from its first character on."""

    __slots__ = ("_left", "_open", "_state", "done", "failed")

    def __init__(self) -> None:
        self.done = False  # the value is complete
        self.failed = False  # what was to come next can't follow
        self._state = "value"
        self._open: list[str] = []  # the closing brackets to come
        self._left = ""  # what is left of a literal, or x for each hexadecimal digit to come

    @property
    def in_string(self) -> bool:
        """This is the inside of a string: any text may follow, but for control characters."""
        return self._state in ("string", "key string")

    def push(self, text: str, at: int = 0) -> int:
        """Take `text` from `at` on; returns where the value ends in it, or where it is malformed."""
        while at < len(text) and not self.done:
            if self.in_string:
                found = _PLAIN.match(text, at)
                assert found is not None
                at = found.end()
                if at == len(text):
                    break
            if not self._step(text[at]):
                self.failed = True
                break
            at += 1
        return at

    def _step(self, c: str) -> bool:
        """Take one character; returns whether it may follow."""
        match self._state:
            case "string" | "key string":
                return self._in_string(c)
            case "escape" | "key escape":
                self._left = "xxxx" if c == "u" else ""
                self._state = self._state.replace("escape", "hex" if c == "u" else "string")
                return c in _ESCAPES
            case "hex" | "key hex":
                self._left = self._left[1:]
                if not self._left:
                    self._state = self._state.replace("hex", "string")
                return c in _HEX
            case "literal":
                expected, self._left = self._left[0], self._left[1:]
                if not self._left:
                    self._value_ends()
                return c == expected
        if self._state in _NUMBER:
            following = _NUMBER[self._state].get(_KINDS.get(c, ""))
            if following is not None:
                self._state = following
                return True
            if self._state not in _NUMBER_ENDS:
                return False
            self._value_ends()
        return c in WHITE_SPACE or self._structure(c)

    def _in_string(self, c: str) -> bool:
        is_key = self._state == "key string"
        if c == "\\":
            self._state = "key escape" if is_key else "escape"
        elif c != '"':
            return False
        elif is_key:
            self._state = "colon"
        else:
            self._value_ends()
        return True

    def _structure(self, c: str) -> bool:
        """Take a character between strings, numbers and literals."""
        state = self._state
        if state == "colon":
            self._state = "value"
            return c == ":"
        if state in ("key", "first key") and c == '"':
            self._state = "key string"
            return True
        if c in "}]" and state in ("comma", "first key", "first item"):
            if c != self._open.pop():
                return False
            self._value_ends()
            return True
        if state == "comma":
            self._state = "key" if self._open[-1] == "}" else "value"
            return c == ","
        return state in ("value", "first item") and self._value_begins(c)

    def _value_begins(self, c: str) -> bool:
        if c == '"':
            self._state = "string"
        elif c in "{[":
            self._open.append("}" if c == "{" else "]")
            self._state = "first key" if c == "{" else "first item"
            return len(self._open) <= MAX_DEPTH
        elif not self._open:
            return False
        elif c in _LITERALS:
            self._state, self._left = "literal", _LITERALS[c]
        else:
            self._state = {"-": "minus", "0": "zero"}.get(c, "digits")
            return c in "-0123456789"
        return True

    def _value_ends(self) -> None:
        self._state = "comma"
        self.done = not self._open
