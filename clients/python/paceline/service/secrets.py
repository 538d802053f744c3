"""Secrets that a parent writes to a service: one line of JSON on standard input, never shown or stored."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping

from paceline.service.known import nearest
from paceline.service.parent import STDIN

MAX_LINE_BYTES = 64 << 10
_MAX_SECRET = 4096


def read_secrets(known: Collection[str]) -> Mapping[str, str]:
    """The secrets of the first line of standard input; waits for it.

    What follows the line stays unread. Raises ValueError, with the names but never with the values of
    what is wrong.
    """
    return parse_secrets(_read_line(), known)


def parse_secrets(line: bytes, known: Collection[str]) -> Mapping[str, str]:
    """A JSON object of strings, each of them one of the `known` secrets. Raises ValueError."""
    try:
        given = json.loads(line)
    except ValueError:
        raise ValueError("the line of secrets is not JSON") from None
    if not isinstance(given, dict):
        raise ValueError("the line of secrets is no JSON object")
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"no secret is called {name!r:.80}{nearest(name, known)}")
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_SECRET:
            raise ValueError(f"{name}: expected a string of 1 to {_MAX_SECRET} characters")
        check_token(name, value)
    return given


def check_token(source: str, token: str) -> None:
    """Raises ValueError unless the token can travel as metadata: visible ASCII, no spaces."""
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{source}: a token is visible ASCII without spaces")


def _read_line() -> bytes:
    line = b""
    while len(line) <= MAX_LINE_BYTES:
        # Byte by byte: what comes behind the line is not ours to take.
        byte = os.read(STDIN, 1)
        if byte == b"\n":
            return line
        if not byte:
            raise ValueError("standard input ended before the line of secrets")
        line += byte
    raise ValueError(f"the line of secrets has more than {MAX_LINE_BYTES} bytes")
