"""Secrets that a parent process writes to a service: one line of JSON on standard input.

They are never logged and never written to a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping

from service_kit.known import nearest
from service_kit.parent import STDIN

MAX_LINE_BYTES = 64 << 10
_MAX_SECRET = 4096


def read_secrets(known: Collection[str]) -> Mapping[str, str]:
    """Wait for the first line of standard input; the secrets in it, by name.

    Bytes after the line stay unread. Raises ValueError, whose message has names of secrets, never values.
    """
    return parse_secrets(_read_line(), known)


def parse_secrets(line: bytes, known: Collection[str]) -> Mapping[str, str]:
    """The secrets in a JSON object of strings.

    Raises ValueError if it is no such object, or has a name that is not in `known`.
    """
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
    """Raises ValueError unless gRPC metadata can carry the token: visible ASCII, no spaces."""
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{source}: a token is visible ASCII without spaces")


def _read_line() -> bytes:
    line = b""
    while len(line) <= MAX_LINE_BYTES:
        # Byte by byte: the bytes after the line must stay unread.
        byte = os.read(STDIN, 1)
        if byte == b"\n":
            return line
        if not byte:
            raise ValueError("standard input ended before the line of secrets")
        line += byte
    raise ValueError(f"the line of secrets has more than {MAX_LINE_BYTES} bytes")
