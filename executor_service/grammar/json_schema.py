"""JSON schemas as the grammar engine reads them: what it would take too widely is narrowed or refused.

Some keywords that it does not know are said in others first (`equivalents`).

It computes with doubles and 64-bit integers: a number that it would round is refused where it must be met
exactly, and some (-2**63) would end the process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from executor_service.grammar.equivalents import demand, replace_keywords
from executor_service.grammar.references import check_references
from executor_service.grammar.source import GrammarInvalid

# 29 February only in leap years; the library's `date` and `date-time` have it in each.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY_THERE_IS = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values have schemas by name."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords that have values, no schemas."""
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_MAX_INTEGER = 2.0**63
_BELOW_MAX = int(math.nextafter(_MAX_INTEGER, 0))
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Between tokens of JSON there is no whitespace but this, unless the schema asks for it in "x-guidance"."""
_WAYS: dict[str, Callable[[Any], object]] = {
    "item_separator": lambda value: isinstance(value, str) and re.fullmatch(r"[ \t\n\r]*,[ \t\n\r]*", value),
    "key_separator": lambda value: isinstance(value, str) and re.fullmatch(r"[ \t\n\r]*:[ \t\n\r]*", value),
    "whitespace_flexible": lambda value: isinstance(value, bool),
}
"""What a schema may say about how its JSON is written."""


def engine_schema(schema: Any) -> Any:
    """A schema that the engine reads as the given one was meant, wherever it stands. Raises GrammarInvalid.

    It says how its JSON is written. The given one may be changed in place.
    """
    try:
        for part in _schemas(schema):
            _narrow(part)
    except RecursionError:
        raise GrammarInvalid("no JSON schema: recursion limit") from None
    check_references(schema)
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        schema["x-guidance"] = {**_SEPARATORS, **schema.get("x-guidance", {})}
    return schema


def engine_schema_text(text: str) -> str:
    """As `engine_schema`, of JSON. Raises GrammarInvalid."""
    try:
        return json.dumps(engine_schema(json.loads(text)))
    except ValueError as error:
        raise GrammarInvalid(f"no JSON schema: {error}") from None
    except RecursionError:
        raise GrammarInvalid("no JSON schema: recursion limit") from None


def _narrow(schema: dict[str, Any]) -> None:
    """One schema without those in it; changed in place."""
    replace_keywords(schema)
    _demand_distinct_keys(schema)
    _bound(schema)
    for keyword in ("const", "enum"):
        _demand_doubles(keyword, schema.get(keyword))
    if schema.get("format") in ("date", "date-time"):
        _demand_pattern(schema, _DAY_THERE_IS)
    if "x-guidance" in schema:
        _check_ways(schema["x-guidance"])


def _schemas(node: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas in it, definitions too; what the caller adds to a yielded one comes next."""
    if isinstance(node, list):
        for each in node:
            yield from _schemas(each)
    elif isinstance(node, dict):
        yield node
        for keyword, value in list(node.items()):
            if keyword in _MAPS and isinstance(value, dict):
                yield from _schemas(list(value.values()))
            elif keyword not in _VALUES:
                yield from _schemas(value)


def _demand_distinct_keys(schema: dict[str, Any]) -> None:
    """A key that the schema does not name may come twice, which the engine counts as two properties."""
    minimum, required = schema.get("minProperties", 0), schema.get("required", ())
    if isinstance(minimum, int) and isinstance(required, list | tuple) and minimum > len(required) + 1:
        raise GrammarInvalid(f"minProperties: {minimum}: at most one more than the required ones")


def _bound(schema: dict[str, Any]) -> None:
    """Round bounds inwards to what the engine can tell apart."""
    for keyword in (*_LOWER, *_UPPER):
        bound = schema.get(keyword)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        lower = keyword in _LOWER
        if (bound >= _MAX_INTEGER) if lower else (bound <= -_MAX_INTEGER):
            raise GrammarInvalid(f"{keyword}: {bound}: beyond 64 bits")
        if isinstance(bound, int) and abs(bound) > 2**53:
            if keyword.startswith("exclusive"):  # its sum with 1 may be rounded back to it
                bound += 1 if lower else -1
            bound = max(-_BELOW_MAX, bound) if lower else min(_BELOW_MAX, bound)
            rounded = float(bound)
            if (rounded < bound) if lower else (rounded > bound):
                rounded = math.nextafter(rounded, math.inf if lower else -math.inf)
            schema[keyword] = int(rounded)


def _demand_doubles(keyword: str, value: Any) -> None:
    """Refuse integers that the engine would round."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _demand_doubles(keyword, each)
    elif isinstance(value, int) and abs(value) > 2**53 and (abs(value) > _BELOW_MAX or float(value) != value):
        raise GrammarInvalid(f"{keyword}: {value}: this integer is no double, or beyond 64 bits")


def _demand_pattern(schema: dict[str, Any], pattern: str) -> None:
    """Demand another pattern of a schema's strings."""
    if "pattern" not in schema:
        schema["pattern"] = pattern
    else:
        demand(schema, {"pattern": pattern})


def _check_ways(ways: Any) -> None:
    """Only how JSON is written may be asked for: not that less is demanded, nor that it is no JSON."""
    if not isinstance(ways, dict) or not all(key in _WAYS and _WAYS[key](way) for key, way in ways.items()):
        raise GrammarInvalid(f"x-guidance: an object with some of {', '.join(_WAYS)}, for JSON")
