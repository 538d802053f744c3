"""Keywords of arrays that the grammar engine does not know: `uniqueItems`, `contains` and their kin.

Where an array's items can be listed, so can the arrays: they become an `enum`. One item that is demanded in
a short array is demanded at its first place, its second, and so on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from executor_service.grammar.equivalents import ANNOTATIONS, demand, is_count
from executor_service.grammar.shared import SharedSchemas

MAX_ARRAYS = 400
"""Arrays that stand for a schema. Their number of items after one terminal is limited to 1,000."""

_MAX_VALUES = 64
_MAX_PLACES = 16
_MAX_DEPTH = 8  # of references and alternatives
_KEYWORDS = frozenset({"uniqueItems", "contains", "minContains", "maxContains"})
_OF_ARRAYS = _KEYWORDS | {"items", "minItems", "maxItems"}
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_OTHER_TYPES = ["null", "boolean", "object", "number", "string"]


def replace_array_keywords(schema: dict[str, Any], shared: SharedSchemas) -> None:
    """Replace `uniqueItems`, `contains` and their kin by keywords that the engine knows, where possible.

    The schema is changed in place. Its arrays become an `enum` if they can be listed; else `contains` becomes
    an `anyOf` with one part for each place of the array.
    """
    _drop_idle(schema)
    if not schema.keys() & {"uniqueItems", "contains"}:
        return
    arrays = _arrays(schema, shared)
    if arrays is None:
        _contain_by_place(schema, shared)
        return
    for keyword in _OF_ARRAYS & schema.keys():
        del schema[keyword]
    if arrays and schema.get("type") == "array" and not schema.keys() & {"enum", "const"}:
        schema["enum"] = arrays
    else:
        demand(schema, {"anyOf": [{"enum": arrays}] * bool(arrays) + [{"type": _OTHER_TYPES}]})


def values_of(schema: Any, shared: SharedSchemas, depth: int = 0) -> list[Any] | None:
    """All values of a schema, each once; None: they are too many, or it can't be said."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    shared.spend(1 + len(schema))
    meaning = {keyword: value for keyword, value in schema.items() if keyword not in ANNOTATIONS}
    types = meaning.pop("type", None)
    match meaning:
        case {"const": value, **rest} if not rest:
            values = [value]
        case {"enum": [*values], **rest} if not rest:
            pass
        case {"$ref": str() as reference, **rest} if not rest and types is None:
            return values_of(shared.target(reference), shared, depth + 1)
        case {"anyOf": [*parts], **rest} if not rest:
            found = [values_of(part, shared, depth + 1) for part in parts]
            if any(each is None for each in found):
                return None
            values = [value for each in found if each is not None for value in each]
        case {**bounds} if types == "integer" and bounds and bounds.keys() <= _BOUNDS:
            return _integers(bounds)
        case {**rest} if not rest and types in ("boolean", "null"):
            return [False, True] if types == "boolean" else [None]
        case _:
            return None
    if len(values) > 4 * _MAX_VALUES:
        return None
    unique = {_key(value): value for value in values if _has_type(value, types)}
    shared.spend(sum(map(len, unique)) // 16)
    return list(unique.values()) if len(unique) <= _MAX_VALUES else None


def _drop_idle(schema: dict[str, Any]) -> None:
    """Drop the keywords that demand nothing."""
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (is_count(most) and most <= 1):
        schema.pop("uniqueItems", None)
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        schema.pop("contains", None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)


def _arrays(schema: dict[str, Any], shared: SharedSchemas) -> list[list[Any]] | None:
    """All arrays that meet the keywords of arrays; None: they can't be listed."""
    others = schema.keys() - _OF_ARRAYS - ANNOTATIONS - {"type"}
    if others & {"prefixItems", "additionalItems", "unevaluatedItems"}:
        return None
    values, unique = values_of(schema.get("items"), shared), schema.get("uniqueItems", False)
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if unique is True and values is not None:
        most = min(len(values), most) if is_count(most) else len(values)
    if values is None or not is_count(least) or not is_count(most) or not isinstance(unique, bool):
        return None
    low, high, wanted = 0, most, set[str]()
    if "contains" in schema:
        members = values_of(schema["contains"], shared)
        low, high = schema.get("minContains", 1), schema.get("maxContains", most)
        if members is None or not is_count(low) or not is_count(high):
            return None
        wanted = {_key(member) for member in members}
    found = []
    for looked, array in enumerate(_sequences(values, most, unique=unique)):
        if looked == MAX_ARRAYS:
            return None
        shared.spend(1 + len(array))
        if len(array) >= least and low <= sum(_key(item) in wanted for item in array) <= high:
            found.append(array)
    return found


def _sequences(values: list[Any], most: int, *, unique: bool) -> Iterator[list[Any]]:
    """All arrays of these values, the short ones first."""
    level: list[list[Any]] = [[]]
    for _ in range(most + 1):
        yield from level
        level = [
            [*array, value]
            for array in level[:MAX_ARRAYS]
            for value in values
            if not unique or not any(value is item for item in array)
        ]


def _contain_by_place(schema: dict[str, Any], shared: SharedSchemas) -> None:
    """Replace `contains` of a short array by an `anyOf`: the item is first, second, and so on."""
    most = schema.get("maxItems")
    if not is_count(most) or not 1 <= most <= _MAX_PLACES or schema.keys() & {"uniqueItems", "maxContains"}:
        return
    if schema.get("minContains", 1) != 1 or (item := shared.reference(schema["contains"])) is None:
        return
    del schema["contains"]
    schema.pop("minContains", None)
    shared.spend(most * most)
    places = [
        {"prefixItems": [True] * before + [dict(item)], "minItems": before + 1} for before in range(most)
    ]
    demand(schema, {"anyOf": places})


def _integers(bounds: dict[str, Any]) -> list[Any] | None:
    if not all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds.values()):
        return None
    lower = [bounds[k] + k.startswith("ex") for k in ("minimum", "exclusiveMinimum") if k in bounds]
    upper = [bounds[k] - k.startswith("ex") for k in ("maximum", "exclusiveMaximum") if k in bounds]
    if not lower or not upper or min(upper) - max(lower) >= _MAX_VALUES:
        return None
    return list(range(max(lower), min(upper) + 1))


def _has_type(value: Any, types: Any) -> bool:
    if types is None:
        return True
    whole = isinstance(value, float) and value.is_integer()
    own = {
        bool: ("boolean",),
        int: ("integer", "number"),
        float: ("integer", "number") if whole else ("number",),
        str: ("string",),
        list: ("array",),
        dict: ("object",),
        type(None): ("null",),
    }[type(value)]
    return any(each in own for each in (types if isinstance(types, list) else [types]))


def _key(value: Any) -> str:
    """Equal for equal values of JSON: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
