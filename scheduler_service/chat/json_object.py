"""JSON objects that clients send as text: schemas of tools, and arguments of calls."""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

_MAX_DEPTH = 64
_NO_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[^][{}"]+')


def parse_object(text: str) -> dict[str, object]:
    """A JSON object; of an empty text the empty one.

    Raises ValueError if the text is anything else: also for numbers that are not finite, half a surrogate
    pair, or values nested more than 64 deep.
    """
    if not text:
        return {}
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if not _is_shallow(text):
            raise ValueError(f"nested more than {_MAX_DEPTH} deep")
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # also UnicodeEncodeError: half a surrogate pair
        raise ValueError(f"is no JSON that can be used: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _is_shallow(text: str) -> bool:
    """Whether no value in valid JSON is nested more than _MAX_DEPTH deep; a megabyte takes milliseconds."""
    brackets = _NO_BRACKETS.sub("", text)
    for _ in range(_MAX_DEPTH):
        brackets = brackets.replace("{}", "").replace("[]", "")
    return not brackets


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:32]} is too large")
    return value
