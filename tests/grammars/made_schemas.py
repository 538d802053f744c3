"""JSON schemas drawn from a grammar of schemas: what people ask models for, with some rarer keywords."""

from __future__ import annotations

import random
from typing import Any

_NAMES = [
    "name", "title", "age", "email", "tags", "address", "street", "city", "price", "count", "active", "kind",
    "items", "id", "date", "notes", "score", "parent", "children", "answer", "reason", "steps", "größe",
    "x-y",
]  # fmt: skip
_WORDS = ["red", "green", "blue", "small", "large", "yes", "no", "a b", "ü", '"', "", "null", "1"]
_PATTERNS = [
    "^[A-Z]{2}-[0-9]{3,5}$", "^(foo|bar)+$", "^[a-z]+(_[a-z]+){0,2}$", "^[^0-9\"]{1,8}$", "^#[0-9a-fA-F]{6}$",
    "[0-9]{2}", "^v[0-9]+\\.[0-9]+$", "^\\([0-9]{3}\\) ?[0-9]{4}$", "^$|^x", "^[äöü]{1,4}$",
]  # fmt: skip
_FORMATS = ["date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration"]


class SchemaMaker:
    """Draws one schema after another; the same seed draws the same."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._defs: dict[str, Any] = {}

    def draw(self) -> dict[str, Any]:
        """The next one; mostly an object."""
        rng = self._rng
        self._defs = {}
        schema = self._object(2) if rng.random() < 0.8 else self._any(2)
        if self._defs:
            schema = {**schema, "$defs": self._defs}
        if rng.random() < 0.06:  # what is not understood, at the top, where it can't be overlooked
            schema.update(
                rng.choice(
                    [
                        {"not": {"required": ["nope"]}},
                        {"if": {"required": ["name"]}, "then": {"required": ["id"]}},
                        {"propertyNames": {"maxLength": 9}},
                        {"dependentRequired": {"name": ["id"]}},
                        {"contains": {"type": "integer"}},
                    ]
                )
            )
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kinds = [self._string, self._integer, self._number, self._constant]
        if depth:
            kinds += [self._array, self._object, self._union, self._reference, self._merged]
        schema = rng.choice(kinds)(depth)
        if rng.random() < 0.2:
            schema = {**schema, "description": "What this is.", "title": "A title"}
        return schema

    def _string(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        match rng.randrange(6):
            case 0:
                return {"type": "string"}
            case 1:
                low = rng.randrange(4)
                return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(20)}
            case 2:
                return {"type": "string", "pattern": rng.choice(_PATTERNS)}
            case 3:
                return {"type": "string", "format": rng.choice(_FORMATS)}
            case 4:
                return {"type": "string", "pattern": "^[a-z ]*$", "maxLength": rng.randrange(1, 12)}
        return {"enum": rng.sample(_WORDS, rng.randrange(1, 5))}

    def _integer(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        low = rng.choice([-1000, -7, 0, 1, 18])
        return rng.choice(
            [
                {"type": "integer"},
                {"type": "integer", "minimum": low},
                {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 5, 99, 10**6])},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 12},
                {"type": "integer", "multipleOf": rng.choice([2, 5, 12]), "minimum": 0, "maximum": 500},
            ]
        )

    def _number(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        return rng.choice(
            [
                {"type": "number"},
                {"type": "number", "minimum": 0, "maximum": rng.choice([1, 9.5, 100])},
                {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0.25},
                {"type": ["number", "null"]},
                {"type": "number", "multipleOf": rng.choice([0.5, 0.01]), "minimum": 0, "maximum": 20},
            ]
        )

    def _constant(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        return rng.choice(
            [
                {"type": "boolean"},
                {"type": "null"},
                {"const": rng.choice([1, "fixed", None, {"a": [1, "b"]}, 1.5, False])},
                {"enum": [1, "a", None, True, [2], {"k": "v"}]},
                {"type": ["string", "null"], "maxLength": 10},
                {"type": ["boolean", "integer"]},
            ]
        )

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        low = rng.randrange(3)
        schema: dict[str, Any] = {"type": "array", "items": self._any(depth - 1)}
        match rng.randrange(5):
            case 0:
                schema["maxItems"] = low + rng.randrange(4)
                schema["minItems"] = low
            case 1:
                schema["minItems"] = low
            case 2:
                schema = {"type": "array", "prefixItems": [self._any(0) for _ in range(rng.randrange(1, 4))]}
                schema |= rng.choice([{"items": False}, {"items": {"type": "integer"}}, {"minItems": 1}])
            case 3:
                schema["maxItems"] = 3
        if rng.random() < 0.05:
            schema["uniqueItems"] = True
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randrange(1, 6))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth - 1 if depth else 0) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
        }
        match rng.randrange(10):
            case 0:
                schema["additionalProperties"] = self._any(0)
            case 1:
                schema["patternProperties"] = {"^x-[a-z]{1,3}$": self._any(0)}
                schema["additionalProperties"] = False
            case 2:
                pass
            case _:
                schema["additionalProperties"] = False
        return schema

    def _union(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        parts = [self._any(depth - 1) for _ in range(rng.randrange(2, 4))]
        if rng.random() < 0.3:  # that can be told apart by a constant
            tagged = [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "value": self._any(0)},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for kind in ("circle", "square")
            ]
            return {"oneOf": tagged}
        return (
            {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "integer"}]}
            if rng.random() < 0.3
            else {"anyOf": parts}
        )

    def _reference(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        name = rng.choice(["Node", "Point", "Leaf"])
        if name == "Node":
            self._defs["Node"] = {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        elif name not in self._defs:
            self._defs[name] = {"type": "null"}  # so that a reference within does not draw without end
            self._defs[name] = self._any(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def _merged(self, depth: int) -> dict[str, Any]:
        first, second = self._object(depth - 1), self._object(depth - 1)
        for part in (first, second):
            part.pop("additionalProperties", None)
            part.pop("patternProperties", None)
        second["properties"] = {f"{name}2": one for name, one in second["properties"].items()}
        second["required"] = [f"{name}2" for name in second["required"]]
        return (
            {"allOf": [first, second], "unevaluatedProperties": False}
            if self._rng.random() < 0.1
            else {"allOf": [first, second]}
        )
