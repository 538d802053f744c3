"""JSON schemas as the grammar engine reads them: what it would take too widely is narrowed or refused.

It computes with doubles and 64-bit integers (`integers`). What it does not know is said in keywords that it
knows (`equivalents`, `arrays`, `formats`), or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from executor_service.grammar.arrays import replace_array_keywords
from executor_service.grammar.equivalents import demand, replace_keywords
from executor_service.grammar.formats import replace_format
from executor_service.grammar.integers import bound_numbers
from executor_service.grammar.references import check_references
from executor_service.grammar.shared import SharedSchemas
from executor_service.grammar.source import GrammarInvalid

# 29 February only in leap years; the library's `date` and `date-time` have it in each.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY_THERE_IS = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values have schemas by name."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords that have values, no schemas."""
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Between tokens of JSON there is no whitespace but this, unless the schema asks for it in "x-guidance"."""
_WAYS: dict[str, Callable[[Any], object]] = {
    "item_separator": lambda value: isinstance(value, str) and re.fullmatch(r"[ \t\n\r]*,[ \t\n\r]*", value),
    "key_separator": lambda value: isinstance(value, str) and re.fullmatch(r"[ \t\n\r]*:[ \t\n\r]*", value),
    "whitespace_flexible": lambda value: isinstance(value, bool),
}
"""What a schema may say about how its JSON is written."""


def engine_schema(schema: Any, warnings: list[str]) -> Any:
    """A schema that the engine reads as the given one was meant, wherever it stands. Raises GrammarInvalid.

    It says how its JSON is written. The given one may be changed in place. What has no effect is added to
    `warnings`.
    """
    try:
        _narrow_all(schema, warnings)
    except RecursionError:
        raise GrammarInvalid("no JSON schema: recursion limit") from None
    check_references(schema)
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        schema["x-guidance"] = {**_SEPARATORS, **schema.get("x-guidance", {})}
    return schema


def engine_schema_text(text: str, warnings: list[str]) -> str:
    """As `engine_schema`, of JSON. Raises GrammarInvalid."""
    try:
        return json.dumps(engine_schema(json.loads(text), warnings))
    except ValueError as error:
        raise GrammarInvalid(f"no JSON schema: {error}") from None
    except RecursionError:
        raise GrammarInvalid("no JSON schema: recursion limit") from None


def _narrow_all(root: Any, warnings: list[str]) -> None:
    """Narrow all schemas in a root, in place, also the definitions that this adds to it."""
    shared = SharedSchemas(root)
    left = [root]
    while left:
        for schema in left:
            for part in _schemas(schema):
                _narrow(part, shared, warnings)
        left = shared.take_new()
    shared.add()


def _narrow(schema: dict[str, Any], shared: SharedSchemas, warnings: list[str]) -> None:
    """Narrow one schema, in place, without the schemas in it."""
    replace_keywords(schema)
    shared.keep_branches(schema)
    replace_array_keywords(schema, shared)
    _demand_distinct_keys(schema)
    bound_numbers(schema, shared)
    replace_format(schema, warnings)
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
