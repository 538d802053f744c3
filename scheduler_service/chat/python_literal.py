"""A Python literal as JSON: what models write for the arguments of a call in Python's syntax."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from scheduler_service.chat.json_scanner import MAX_DEPTH

MAX_PARTS = 32_768
"""Of a literal that is no JSON: strings, numbers, names, marks and escapes. They are read one by one, in the
scheduler's event loop: a megabyte of them would hold it for two seconds."""

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+")
    | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
    | (?P<name>[A-Za-z]+)
    | (?P<mark>[][(){}:,])
    )""",
    re.VERBOSE | re.DOTALL,
)
_NAMES = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))", re.DOTALL
)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "/": "/"}
_CLOSE = {"[": "]", "(": ")", "{": "}"}


def literal_as_json(text: str) -> str:
    """JSON of one literal: a text that is JSON stays as it is.

    Raises ValueError for anything else, and for a literal of more than `MAX_PARTS`.
    """
    text = text.strip()
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = _Reader(text).whole()
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # A half of a surrogate pair is no text; JSON can have it as an escape.
        return written if _is_text(written) else json.dumps(value, allow_nan=False)
    return text


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._left = text, 0, MAX_PARTS
        self._kind: str | None = None
        self._token = ""
        self._advance()

    def whole(self) -> Any:
        value = self._value(0)
        if self._kind is not None:
            raise ValueError("something behind the value")
        return value

    def _advance(self) -> None:
        if self._at >= len(self._text):
            self._kind = None
            return
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise ValueError(f"no literal: {self._text[self._at : self._at + 20]!r}")
        self._at, self._kind = found.end(), found.lastgroup
        self._token = found[found.lastgroup or 0]
        self._left -= 1 + self._token.count("\\")
        if self._left < 0:
            raise ValueError(f"no literal of more than {MAX_PARTS} parts is read")

    def _value(self, depth: int) -> Any:
        kind, token = self._kind, self._token
        if kind is None or depth > MAX_DEPTH:
            raise ValueError("no value, or one too deep")
        self._advance()
        match kind:
            case "string":
                return _ESCAPE.sub(_unescaped, token[1:-1])
            case "number":
                return float(token) if any(c in token for c in ".eE") else int(token)
            case "name" if token in _NAMES:
                return _NAMES[token]
            case "mark" if token in _CLOSE:
                return self._items(token, depth)
        raise ValueError(f"no value: {token[:20]!r}")

    def _items(self, opened: str, depth: int) -> Any:
        """The items of a list, a tuple or a dictionary."""
        close = _CLOSE[opened]
        values: list[Any] = []
        keys: list[str] = []
        while not self._skip(close):
            if values and not self._skip(","):
                raise ValueError("no comma between two items")
            if values and self._skip(close):
                break
            if opened == "{":
                key = self._value(depth + 1)
                if not isinstance(key, str) or not self._skip(":"):
                    raise ValueError("keys must be strings, with a colon behind them")
                keys.append(key)
            values.append(self._value(depth + 1))
        return dict(zip(keys, values, strict=True)) if opened == "{" else values

    def _skip(self, mark: str) -> bool:
        found = self._kind == "mark" and self._token == mark
        if found:
            self._advance()
        return found


def _unescaped(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits:
        return chr(int(digits, 16))
    c = escape[4]
    return c if c in "\\'\"" else _ESCAPED.get(c, "\\" + c)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
