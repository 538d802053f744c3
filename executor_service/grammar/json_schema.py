"""JSON schemas as the grammar engine reads them: what it would take too widely is narrowed or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from executor_service.grammar.source import GrammarInvalid

# 29 February only in leap years; the library's `date` and `date-time` have it in each.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY_THERE_IS = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values have schemas by name."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords that have values, no schemas."""


def engine_schema(schema: Any) -> Any:
    """A schema that the engine reads as the given one was meant; changed in place. Raises GrammarInvalid."""
    for part in _schemas(schema):
        _demand_distinct_keys(part)
        if part.get("format") in ("date", "date-time"):
            _narrow(part, _DAY_THERE_IS)
    return schema


def engine_schema_text(text: str) -> str:
    """As `engine_schema`, of JSON; the engine refuses what can't be parsed. Raises GrammarInvalid."""
    try:
        schema = json.loads(text)
        before = json.dumps(schema)
        after = json.dumps(engine_schema(schema))
    except (ValueError, RecursionError):
        return text
    return text if before == after else after


def _schemas(node: Any) -> Iterator[dict[str, Any]]:
    """A schema and all in it, wherever a reference may find them."""
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


def _narrow(schema: dict[str, Any], pattern: str) -> None:
    """Demand another pattern of a schema's strings."""
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append({"pattern": pattern})
