"""Arguments that models write without quotation marks: which of them may be texts, and their JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from scheduler_service.chat.python_literal import literal_as_json

TextArguments = Mapping[str, frozenset[str]]
"""A tool's arguments that by its schema may be texts, each with the other types of JSON that it may have."""

_ALL = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_INTEGER = re.compile(r"-?\d+")
_FIRST = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_MAX_DEPTH = 16  # references and combinations within one another


def text_arguments(schema: Mapping[str, object]) -> dict[str, frozenset[str]]:
    """The arguments that may be texts, by the JSON schema of a tool's parameters."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    kinds = {name: _kinds(value, schema, 0) for name, value in properties.items()}
    return {name: found - {"string"} for name, found in kinds.items() if "string" in found and found != _ALL}


def argument_as_json(text: str, others: frozenset[str] | None) -> str:
    """JSON of an argument's text. `others`: as in TextArguments; None: nothing says that it may be a text."""
    if others is None or others:
        try:
            literal = literal_as_json(text)
        except ValueError:
            literal = ""
        if literal and (others is None or _kind(literal) in others):
            return literal
    return json.dumps(text, ensure_ascii=False)


def resolved(schema: object, root: Mapping[str, object]) -> object:
    """The schema that a `$ref` alone refers to within `root`; else the schema as it is."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for step in reference.removeprefix("#/").split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema


def _kinds(schema: object, root: Mapping[str, object], depth: int) -> frozenset[str]:
    """The types of JSON that a schema leaves; all of them if it says nothing that is read here."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _ALL
    found = _ALL
    if (types := schema.get("type")) is not None:
        named = {types} if isinstance(types, str) else set(types) if _are_texts(types) else _ALL
        found &= named | ({"integer"} if "number" in named else set())
    if "const" in schema:
        found &= {_kind(json.dumps(schema["const"]))}
    if isinstance(values := schema.get("enum"), Sequence) and not isinstance(values, str):
        found &= {_kind(json.dumps(value)) for value in values}
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), Sequence) and choices and not isinstance(choices, str):
            found &= frozenset().union(*(_kinds(choice, root, depth + 1) for choice in choices))
    if isinstance(parts := schema.get("allOf"), Sequence) and not isinstance(parts, str):
        for part in parts:
            found &= _kinds(part, root, depth + 1)
    return found


def _kind(literal: str) -> str:
    """The type of a value of JSON."""
    return _FIRST.get(literal[0]) or ("integer" if _INTEGER.fullmatch(literal) else "number")


def _are_texts(types: object) -> bool:
    return isinstance(types, Sequence) and all(isinstance(one, str) for one in types)
