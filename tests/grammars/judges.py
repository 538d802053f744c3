"""Whether a text is one of a grammar, by libraries that have nothing to do with the engine under test."""

from __future__ import annotations

import json
import re
from datetime import date, time
from decimal import Decimal, InvalidOperation, localcontext
from functools import lru_cache
from typing import Any

import jsonschema
from jsonschema.validators import validator_for
from lark import Lark
from lark.exceptions import LarkError

from executor_service.grammar.source import GrammarSource

_FORMATS = jsonschema.FormatChecker(["email", "uuid", "ipv4", "ipv6", "regex"])
_CLOCK = r"\d{2}:\d{2}:\d{2}(\.\d+)?([Zz]|[+-]\d{2}:\d{2})"


def _date(value: object) -> bool:
    """RFC 3339's full-date, which has a year 0; it is a leap year, as 2000 is."""
    if isinstance(value, str):
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value, re.ASCII):
            return False
        date.fromisoformat(value if value[:4] != "0000" else "2000" + value[4:])
    return True


def _time(value: object) -> bool:
    """RFC 3339's full-time, leap seconds included."""
    if isinstance(value, str):
        if not re.fullmatch(_CLOCK, value, re.ASCII):
            return False
        hour, minute, second = int(value[:2]), int(value[3:5]), int(value[6:8])
        time(hour, minute, min(second, 59))
        return second <= 60
    return True


def _date_time(value: object) -> bool:
    """RFC 3339's date-time."""
    if isinstance(value, str):
        return value[10:11] in ("T", "t") and _date(value[:10]) and _time(value[11:])
    return True


for _name, _check in (("date", _date), ("time", _time), ("date-time", _date_time)):
    _FORMATS.checks(_name, raises=ValueError)(_check)


def complaint(source: GrammarSource, text: str) -> str:
    """Why a text is none of the grammar; "": it is one."""
    match source.kind:
        case "json_schema":
            return _json_complaint(source.text, text)
        case "regex":
            return "" if re.fullmatch(source.text, text) else "re.fullmatch says no"
        case "choices":
            return "" if text in source.choices else "none of the choices"
        case "lark":
            try:
                _lark(source.text).parse(text)
            except LarkError as error:
                return f"lark: {' '.join(str(error).split())[:200]}"
            return ""
    raise ValueError(source.kind)


def _json_complaint(schema: str, text: str) -> str:
    try:
        value = json.loads(text, parse_float=_number)  # of a key that comes twice, the last value
    except ValueError as error:
        return f"json: {error}"
    with localcontext(prec=400):
        wrong = next(_validator(schema).iter_errors(value), None)
    return "" if wrong is None else f"jsonschema, at {wrong.json_path}: {wrong.message[:200]}"


def _number(text: str) -> Decimal | float:
    """Exact, so that multipleOf is."""
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond all bounds
        return float(text)


_HYPHEN = re.compile(r"(\\[dDsSwW])-(?=[^\]])")
"""That of `[\\w-_]`, a hyphen in ECMA 262 and Rust, and none in Python."""


def _python_patterns(node: Any) -> Any:
    """A schema whose patterns Python's `re` can read."""
    if isinstance(node, list):
        return [_python_patterns(each) for each in node]
    if not isinstance(node, dict):
        return node
    read = {key: _python_patterns(value) for key, value in node.items()}
    if isinstance(read.get("pattern"), str):
        read["pattern"] = _HYPHEN.sub(r"\1\-", read["pattern"])
    if isinstance(named := read.get("patternProperties"), dict):
        read["patternProperties"] = {_HYPHEN.sub(r"\1\-", key): value for key, value in named.items()}
    return read


@lru_cache(16)
def _validator(schema: str) -> Any:
    parsed = _python_patterns(json.loads(schema, parse_float=Decimal))
    return validator_for(parsed, default=jsonschema.Draft202012Validator)(parsed, format_checker=_FORMATS)


@lru_cache(16)
def _lark(grammar: str) -> Lark:
    """Every way of cutting the text into terminals is tried; which one it was is not asked."""
    return Lark(grammar, parser="earley", lexer="dynamic_complete", ambiguity="forest")
