"""Keywords that the library does not know keep their meaning: of every small value, as jsonschema has it."""

from __future__ import annotations

import json
from itertools import combinations, permutations, product

import jsonschema
import pytest

from executor_service.grammar.source import GrammarInvalid
from tests.unit.executor.grammar_readings import matches, schema

INTEGER = {"type": "integer"}
SAID_OTHERWISE = {
    "not a property": {"type": "object", "not": {"required": ["a"]}, "properties": {"b": INTEGER}},
    "not a property, or no object": {"not": {"required": ["a"]}},
    "not both": {"not": {"required": ["a", "b"]}, "additionalProperties": INTEGER},
    "neither": {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    "not all": {"not": {"allOf": [{"required": ["a"]}, {"type": "object"}]}},
    "not not": {"not": {"not": {"required": ["a"]}}},
    "no such type": {"not": {"type": ["string", "null"], "description": "no text"}},
    "no number": {
        "not": {"type": ["number", "integer"]},
        "additionalProperties": {"not": {"type": "string"}},
    },
    "in a branch": {
        "type": "object",
        "anyOf": [
            {"properties": {"a": INTEGER}, "not": {"required": ["b"]}},
            {"properties": {"b": INTEGER}, "not": {"required": ["a"]}},
        ],
    },
    "of a reference": {"$ref": "#/$defs/x", "$defs": {"x": {"not": {"required": ["a"]}}}},
    "by the older drafts": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "object",
        "properties": {"a": INTEGER},
        "additionalProperties": False,
        "not": {"required": ["b"]},
        "dependencies": {"a": ["cd"]},
    },
    "then": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "then and else": {
        "type": "object",
        "if": {"required": ["a"]},
        "then": {"properties": {"b": INTEGER}},
        "else": {"required": ["b"]},
    },
    "else": {"if": {"type": "object"}, "else": {"type": "string"}},
    "then without if": {"then": {"required": ["b"]}, "additionalProperties": INTEGER},
    "required by others": {"dependentRequired": {"a": ["b"], "b": ["cd"]}},
    "required by others, among named ones": {
        "type": "object",
        "properties": {"a": INTEGER, "b": {}, "cd": {}},
        "additionalProperties": False,
        "dependentRequired": {"a": ["b"], "cd": ["a", "b"]},
    },
    "demanded by others": {"dependentSchemas": {"a": {"properties": {"b": INTEGER}, "required": ["b"]}}},
    "as one says in draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "dependencies": {"a": ["b"], "b": {"properties": {"cd": INTEGER}}},
    },
    "any names": {"type": "object", "propertyNames": {"type": "string", "title": "t"}},
    "names of a length": {"type": "object", "propertyNames": {"maxLength": 1}},
    "names of another length": {
        "propertyNames": {"minLength": 2, "maxLength": 3},
        "properties": {"a": INTEGER},
    },
    "names by a pattern": {
        "propertyNames": {"pattern": "^[ab]"},
        "properties": {"a": INTEGER, "cd": {}},
        "additionalProperties": {"type": "string"},
    },
    "these names": {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
    "one name": {"propertyNames": {"const": "a"}, "properties": {"a": INTEGER, "b": {}}},
    "what parts know": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"cd": {}}},
        ],
        "unevaluatedProperties": False,
    },
    "what is left over": {
        "type": "object",
        "allOf": [{"properties": {"a": True}}],
        "properties": {"b": INTEGER},
        "unevaluatedProperties": {"type": "string"},
    },
    "nothing is left over": {"additionalProperties": INTEGER, "unevaluatedProperties": False},
    "all that is left over": {
        "anyOf": [{"required": ["a"]}, {"type": "string"}],
        "unevaluatedProperties": True,
    },
    "exactly one": {
        "properties": {"a": INTEGER, "b": INTEGER},
        "oneOf": [{"required": ["a"]}, {"required": ["b"], "description": "b"}, {"required": ["cd"]}],
    },
    "one of several kinds": {
        "oneOf": [
            {"required": ["a"], "properties": {"a": {"enum": ["s"]}}, "additionalProperties": False},
            {"required": ["a"], "properties": {"a": {"enum": [1]}, "b": {}}},
        ],
    },
    "one of several types": {"oneOf": [INTEGER, {"type": "string"}, {"anyOf": [{"type": "null"}]}]},
    "one of several types of a property": {
        "type": "object",
        "oneOf": [
            {"properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]},
            {"properties": {"a": {"type": "string"}, "b": INTEGER}, "required": ["a"]},
        ],
    },
    "equal items": {"uniqueItems": False, "items": INTEGER},
    "one item": {"uniqueItems": True, "maxItems": 1},
    "different items": {"type": "array", "items": {"enum": [1, "s", True, 1.0]}, "uniqueItems": True},
    "different items, or no array": {"items": {"enum": [True, 1]}, "uniqueItems": True, "minItems": 1},
    "different items of a reference": {
        "type": ["array", "null"],
        "items": {"$ref": "#/$defs/x"},
        "uniqueItems": True,
        "$defs": {"x": {"type": "integer", "minimum": 1, "exclusiveMaximum": 3}},
    },
    "different items of two kinds": {
        "type": "array",
        "items": {"anyOf": [{"type": "boolean"}, {"const": "s", "title": "t"}]},
        "uniqueItems": True,
        "maxItems": 2,
    },
    "different items of some": {
        "type": "array",
        "items": {"enum": [1, True, "s"], "type": ["integer", "string"]},
        "uniqueItems": True,
    },
    "too many different items": {"items": {"type": "boolean"}, "uniqueItems": True, "minItems": 3},
    "one of them": {"contains": {"const": 1}, "maxItems": 2},
    "one of them, among others": {
        "type": "array",
        "items": {"type": ["integer", "string"]},
        "contains": {"type": "string"},
        "minContains": 1,
        "maxItems": 3,
    },
    "one of them in a property": {
        "properties": {"a": {"contains": {"type": "integer", "minimum": 2}, "maxItems": 3}},
        "type": ["object", "integer"],
    },
    "two of them": {"items": {"enum": [1, "s"]}, "contains": {"const": 1}, "minContains": 2, "maxItems": 3},
    "at most one of them": {
        "items": {"enum": [1, True]},
        "contains": {"const": 1},
        "maxContains": 1,
        "maxItems": 3,
    },
    "none of them is enough": {"contains": {"const": 1}, "minContains": 0, "items": {"type": "integer"}},
    "none of them": {
        "items": {"enum": [1, True]},
        "contains": {"const": 1},
        "minContains": 0,
        "maxContains": 0,
        "maxItems": 2,
    },
    "without contains": {"minContains": 2, "maxContains": 3, "items": {"type": "integer"}},
    "different, and one of them": {
        "items": {"enum": [1, True, "s"]},
        "uniqueItems": True,
        "contains": {"type": "boolean"},
    },
}
VALUES: list[object] = [1, 1.5, "s", None, True]
VALUES += [list(items) for count in range(4) for items in product((1, 2, "s", True), repeat=count)]
VALUES += [
    dict(zip(names, values, strict=True))
    for count in range(4)
    for names in combinations(("a", "b", "cd"), count)
    for values in product((1, "s") if count < 3 else (1,), repeat=count)
]


@pytest.mark.parametrize("name", SAID_OTHERWISE)
def test_a_keyword_said_otherwise_keeps_exactly_its_values(name: str) -> None:
    value = SAID_OTHERWISE[name]
    grammar = schema(value)
    judge = jsonschema.validators.validator_for(value, default=jsonschema.Draft202012Validator)(value)
    for instance in VALUES:
        orders = permutations(instance.items()) if isinstance(instance, dict) else ()
        texts = [json.dumps(dict(order)) for order in orders] or [json.dumps(instance)]
        assert any(matches(grammar, text) for text in texts) == judge.is_valid(instance), instance


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"not": {"type": "integer"}}, '"not"'),
        ({"not": {"const": 1}}, '"not"'),
        ({"not": {"required": ["a"], "type": "object"}}, '"not"'),
        ({"not": {"anyOf": [{"required": ["a"]}, {"const": 1}]}}, '"not"'),
        ({"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, '"if"'),
        ({"propertyNames": {"format": "uuid"}}, '"propertyNames"'),
        ({"anyOf": [{"required": ["a"]}], "unevaluatedProperties": False}, '"unevaluatedProperties"'),
        ({"oneOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}]}, "oneOf"),
        (
            {"propertyNames": {"pattern": "^[ac]"}, "patternProperties": {"^[ab]": INTEGER}},
            "not disjoint",
        ),
        ({"uniqueItems": True, "maxItems": 2}, '"uniqueItems"'),
        ({"uniqueItems": True, "items": {"enum": list(range(9))}}, '"uniqueItems"'),
        ({"contains": {"type": "string"}}, '"contains"'),
        ({"contains": {"type": "string"}, "maxItems": 3, "minContains": 2}, '"contains"'),
        (
            {"contains": {"type": "string"}, "maxItems": 3, "$id": "http://a/b", "items": {"$id": "c"}},
            '"contains"',
        ),
        ({"oneOf": [{"required": [f"p{number}"]} for number in range(1000)]}, "oneOf"),
    ],
)
def test_what_cannot_be_said_otherwise_is_refused_by_name(value: object, told: str) -> None:
    with pytest.raises(GrammarInvalid, match=told):
        schema(value)
