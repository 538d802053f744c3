"""Numbers of JSON schemas within what the grammar engine computes exactly: doubles and 64-bit integers.

An integer without bounds has those of 64 bits, which are 19 digits: a model that repeats a digit gets an end.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from executor_service.grammar.equivalents import ANNOTATIONS
from executor_service.grammar.shared import SharedSchemas
from executor_service.grammar.source import GrammarInvalid

_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OWN = frozenset({"type", *_LOWER, *_UPPER})
_MAX_INTEGER = 2.0**63
_BELOW_MAX = int(math.nextafter(_MAX_INTEGER, 0))
_BITS = (8, 16, 32, 64)
_FORMATS = {f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in _BITS}
_FORMATS |= {f"uint{bits}": (0, 2**bits - 1) for bits in _BITS}
"""The least and the greatest integer of a format, by OpenAPI's registry."""


def bound_numbers(schema: dict[str, Any], shared: SharedSchemas) -> None:
    """Bound this schema's numbers, in place, by what the engine can tell apart. Raises GrammarInvalid."""
    types = schema.get("type")
    if types in ("integer", "number") or types == ["integer", "null"]:
        _bound_format(schema)
    for keyword in (*_LOWER, *_UPPER):
        _round_inwards(schema, keyword)
    for keyword in ("const", "enum"):
        _demand_doubles(keyword, schema.get(keyword))
    if types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types):
        _bound_integers(schema, shared)


def _demand_doubles(keyword: str, value: Any) -> None:
    """Refuse integers that the engine would round."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _demand_doubles(keyword, each)
    elif isinstance(value, int) and abs(value) > 2**53 and (abs(value) > _BELOW_MAX or float(value) != value):
        raise GrammarInvalid(f"{keyword}: {value}: this integer is no double, or beyond 64 bits")


def _bound_format(schema: dict[str, Any]) -> None:
    """Replace a `format` of integers, such as int32, by its bounds."""
    name = schema.get("format")
    if not isinstance(name, str) or name not in _FORMATS:
        return
    del schema["format"]
    if "const" in schema or "enum" in schema:
        return
    for keyword, bound, tighter in zip(("minimum", "maximum"), _FORMATS[name], (max, min), strict=True):
        schema[keyword] = tighter(bound, schema[keyword]) if _is_number(schema.get(keyword)) else bound


def _bound_integers(schema: dict[str, Any], shared: SharedSchemas) -> None:
    """Bound integers that have no bounds to 64 bits. Schemas that say no more are compiled once for all."""
    if "const" in schema or "enum" in schema:
        return
    for keywords, bound in ((_LOWER, -_BELOW_MAX), (_UPPER, _BELOW_MAX)):
        if not any(_is_number(schema.get(keyword)) for keyword in keywords):
            schema[keywords[0]] = bound
    if schema.keys() <= _OWN | ANNOTATIONS:  # a range costs hundreds of units of fuel
        shared.replace(schema, _OWN)


def _round_inwards(schema: dict[str, Any], keyword: str) -> None:
    """Round an integer bound beyond 2**53 inwards, to a double. Raises GrammarInvalid beyond 64 bits."""
    bound = schema.get(keyword)
    if not _is_number(bound):
        return
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


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
