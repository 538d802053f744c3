"""Keywords of JSON schema that the grammar engine does not know, said in those that it does.

Each rule keeps the set of values: nothing is approximated. Where a keyword has no equivalent it stays, and
the engine refuses it by name.
"""

from __future__ import annotations

from typing import Any, TypeGuard

ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
"""Keywords that demand nothing."""
_OF_OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
)
"""Keywords that every value meets that is no object."""
_LENGTHS = frozenset({"minLength", "maxLength"})
_MAX_EXCLUSIVE = 64
"""Most properties of which only one may be there; the schema that says so grows with the square of them."""
_TYPES = ("null", "boolean", "object", "array", "number", "string")


def demand(schema: dict[str, Any], other: Any) -> None:
    """Demand another schema of the values of a schema, too; changed in place."""
    parts = schema.setdefault("allOf", [])
    if isinstance(parts, list):  # otherwise it is no schema, as the engine will say
        parts.append(other)


def replace_keywords(schema: dict[str, Any]) -> None:
    """Replace the keywords of this schema in place, but not those of its subschemas.

    Call it for these too, those that it adds included.
    """
    _replace_unevaluated(schema)  # first: what is added below is not looked through
    _replace_one_of(schema)
    _replace_not(schema)
    _replace_conditions(schema)
    _replace_dependencies(schema)
    _replace_property_names(schema)


def opposite(schema: Any) -> dict[str, Any] | None:
    """A schema of all other values; None: it can't be said."""
    match _meaning(schema):
        case {"required": [*names], **rest} if names and not rest and _are_texts(names):
            return {"type": "object", "anyOf": [{"properties": {name: False}} for name in names]}
        case {"type": str() | list() as types, **rest} if not rest:
            given = [types] if isinstance(types, str) else types
            others = [each for each in _TYPES if each not in given]
            known = all(each in _TYPES or (each == "integer" and "number" in given) for each in given)
            return {"type": others} if known and others else None  # numbers that are no integers are no type
        case {"anyOf": [*parts], **rest} if parts and not rest:
            return _all("allOf", parts)
        case {"allOf": [*parts], **rest} if parts and not rest:
            return _all("anyOf", parts)
        case {"not": dict() as other, **rest} if not rest:
            return other
    return None


def _all(keyword: str, parts: list[Any]) -> dict[str, Any] | None:
    others = [other for part in parts if (other := opposite(part)) is not None]
    return {keyword: others} if len(others) == len(parts) else None


def _meaning(schema: Any) -> Any:
    """A schema without what only explains."""
    if not isinstance(schema, dict):
        return schema
    return {keyword: value for keyword, value in schema.items() if keyword not in ANNOTATIONS}


def _replace_not(schema: dict[str, Any]) -> None:
    """Replace `not` by the opposite of its schema, where that can be said."""
    other = opposite(schema.get("not"))
    if other is not None:
        del schema["not"]
        demand(schema, other)


def _replace_conditions(schema: dict[str, Any]) -> None:
    """Replace `if`, `then` and `else`, where the opposite of the condition can be said."""
    if "if" not in schema:  # then the others mean nothing
        schema.pop("then", None)
        schema.pop("else", None)
        return
    other = opposite(schema["if"])
    if other is not None:
        condition = schema.pop("if")
        if "then" in schema:
            demand(schema, {"anyOf": [other, schema.pop("then")]})
        if "else" in schema:
            demand(schema, {"anyOf": [condition, schema.pop("else")]})


def _replace_dependencies(schema: dict[str, Any]) -> None:
    """Replace what a property demands: the property is not there, or the demand is met."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        dependencies = schema.get(keyword)
        if isinstance(dependencies, dict):
            del schema[keyword]
            for name, demanded in dependencies.items():
                met = {"required": demanded} if isinstance(demanded, list) else demanded
                demand(schema, {"anyOf": [{"properties": {name: False}}, met]})


def _replace_property_names(schema: dict[str, Any]) -> None:
    """Replace `propertyNames` that give a pattern, a length, or a list of names."""
    if "propertyNames" not in schema:
        return
    names = _meaning(schema["propertyNames"])
    if isinstance(names, dict) and names.get("type") == "string":
        del names["type"]
    properties: dict[str, Any]
    match names:
        case True:
            properties = {}
        case {**keywords} if not keywords:
            properties = {}
        case {"const": str() as name, **rest} if not rest:
            properties = {"properties": {name: True}, "additionalProperties": False}
        case {"enum": [*texts], **rest} if not rest and _are_texts(texts):
            properties = {"properties": dict.fromkeys(texts, True), "additionalProperties": False}
        case {"pattern": str() as pattern, **rest} if not rest:
            properties = {"patternProperties": {pattern: True}, "additionalProperties": False}
        case {**lengths} if lengths.keys() <= _LENGTHS and all(map(is_count, lengths.values())):
            length = f"{{{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}}}"
            properties = {"patternProperties": {f"^[\\s\\S]{length}$": True}, "additionalProperties": False}
        case _:
            return
    del schema["propertyNames"]
    if properties:
        demand(schema, properties)


def _replace_unevaluated(schema: dict[str, Any]) -> None:
    """Replace `unevaluatedProperties` by `additionalProperties`.

    Only where this schema and the `properties` of parts of `allOf` say which properties are evaluated.
    """
    if "unevaluatedProperties" not in schema:
        return
    if schema["unevaluatedProperties"] is True or "additionalProperties" in schema:  # it excludes nothing
        del schema["unevaluatedProperties"]
        return
    plain = ANNOTATIONS | {"type", "properties", "required", "minProperties", "maxProperties"}
    parts = schema.get("allOf", [])
    known = plain | {"allOf", "patternProperties", "unevaluatedProperties", "$defs", "definitions", "$schema"}
    if not isinstance(parts, list) or not schema.keys() <= known | {"$id", "x-guidance"}:
        return
    if not all(isinstance(part, dict) and part.keys() <= plain for part in parts):
        return
    own, others = schema.get("properties", {}), [part.get("properties", {}) for part in parts]
    if all(isinstance(each, dict) for each in (own, *others)):
        schema["properties"] = {**{name: True for each in others for name in each}, **own}
        schema["additionalProperties"] = schema.pop("unevaluatedProperties")


def _replace_one_of(schema: dict[str, Any]) -> None:
    """Let branches of `oneOf` that speak of objects alone demand objects: other values meet all of them."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or len(branches) < 2:
        return
    meanings = [_meaning(branch) for branch in branches]
    if not all(isinstance(one, dict) and one and one.keys() <= _OF_OBJECTS for one in meanings):
        return
    names = [one["required"][0] for one in meanings if _is_one_name(one)]
    if len(set(names)) == len(branches) <= _MAX_EXCLUSIVE:  # exactly one of these properties
        meanings = [
            {"required": [name], "properties": {other: False for other in names if other != name}}
            for name in names
        ]
    schema["oneOf"] = [{"type": "object", **one} for one in meanings]


def _is_one_name(schema: dict[str, Any]) -> bool:
    """Whether a schema demands one property, and nothing else."""
    match schema:
        case {"required": [str()], **rest}:
            return not rest
    return False


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(values: list[Any]) -> bool:
    return all(map(_is_text, values))
