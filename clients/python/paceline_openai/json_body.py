"""Reads JSON that strangers send: UTF-8, no duplicate keys, no NaN, bounded depth and number of values."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from paceline_openai.refusals import Refusal, bad

MAX_DEPTH = 64
"""Nested objects and arrays. Schemas of OpenAI's API have at most ten levels of properties."""
MAX_VALUES = 1 << 19
"""Commas and brackets in a body, those in texts included: a bound of the memory that parsing takes."""

MAX_KEYS = 1 << 15
"""Quotes with a colon after them, those in texts included: keys cost eight times as much as other values."""
_KEY = re.compile(rb'"\s*:')


def read_object(body: bytes | bytearray) -> dict[str, Any]:
    """The object that is the whole body. Raises Refusal, status 400."""
    opening = body.count(b"{") + body.count(b"[")
    if opening + body.count(b",") > MAX_VALUES:
        raise _wrong(f"the body has more than {MAX_VALUES:,} commas and brackets")
    if body.count(b":") > MAX_KEYS and sum(1 for _ in _KEY.finditer(body)) > MAX_KEYS:
        raise _wrong(f"the body has more than {MAX_KEYS:,} keys")
    try:
        value = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise _wrong(f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise _wrong(f"the body is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise _wrong(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _wrong("the body is no JSON object")
    if opening > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _wrong(f"the body is nested more than {MAX_DEPTH} deep")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:80]!r} is there twice")
            seen.add(key)
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _is_deeper(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _wrong(message: str) -> Refusal:
    return bad(None, message, "invalid_json")
