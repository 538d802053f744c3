"""Compares an outcome with what the scenario expects."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any


def differences(expected: Any, found: Any, place: str = "outcome") -> Iterator[str]:
    """What of `expected` is not so in `found`, in words. `tests.scenario` describes the rules."""
    if isinstance(expected, Mapping):
        yield from _of_object(expected, found, place)
    elif isinstance(expected, list):
        yield from _of_list(expected, found, place)
    elif found != expected or isinstance(found, bool) != isinstance(expected, bool):
        yield f"{place} is {found!r}, not {expected!r}"


def _of_object(expected: Mapping[str, Any], found: Any, place: str) -> Iterator[str]:
    match expected:
        case {"contains": text, **rest} if not rest:
            if not isinstance(found, str) or text not in found:
                yield f"{place} is {found!r}, without {text!r}"
        case {"at_least": minimum, **rest} if not rest:
            if not isinstance(found, int | float) or found < minimum:
                yield f"{place} is {found!r}, and not at least {minimum}"
        case {"near": number, **rest} if not rest:
            if not isinstance(found, int | float) or not math.isclose(found, number, rel_tol=1e-5):
                yield f"{place} is {found!r}, and not near {number}"
        case {"sha256": digest, **rest} if not rest:
            if sha256(found) != digest:
                yield f"{place} is {found!r}, whose SHA-256 is {sha256(found)} and not {digest}"
        case _ if not isinstance(found, Mapping):
            yield f"{place} is {found!r}, and no object"
        case _:
            for name, value in expected.items():
                if name not in found:
                    yield f"{place} has no {name}: {dict(found)!r}"
                else:
                    yield from differences(value, found[name], f"{place}.{name}")


def _of_list(expected: list[Any], found: Any, place: str) -> Iterator[str]:
    if not isinstance(found, list) or len(found) != len(expected):
        yield f"{place} is {found!r}, not {len(expected)} elements: {expected!r}"
        return
    for i, (wanted, one) in enumerate(zip(expected, found, strict=True)):
        yield from differences(wanted, one, f"{place}[{i}]")


def sha256(value: Any) -> str:
    """Hex digest of a text's UTF-8, or of another value's JSON without spaces."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
