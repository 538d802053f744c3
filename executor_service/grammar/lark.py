"""Lark grammars as the grammar engine reads them: the JSON schemas in them are checked as others are."""

from __future__ import annotations

import json

from executor_service.grammar.json_schema import engine_schema
from executor_service.grammar.source import GrammarInvalid

_JSON = "%json"
_DECODER = json.JSONDecoder()


def engine_lark(text: str) -> str:
    """A grammar that the engine reads as the given one was meant. Raises GrammarInvalid."""
    if text.lstrip().startswith("{"):  # the library would read it as grammars in a JSON format of its own
        raise GrammarInvalid("JSON, and no Lark grammar")
    if "::" in text:  # they can be made to expand without end, and no limit counts that
        raise GrammarInvalid('rules with parameters (::) are not offered; in a text, write ":" ":"')
    head, *rest = text.split(_JSON)
    return head + "".join(_JSON + _checked(part) for part in rest)


def _checked(part: str) -> str:
    """What stands behind %json, with its schema checked."""
    begin = len(part) - len(part.lstrip(" \t\r\n"))
    try:
        schema, end = _DECODER.raw_decode(part, begin)
        return " " + json.dumps(engine_schema(schema)) + part[end:]
    except (ValueError, RecursionError):
        raise GrammarInvalid(f"{_JSON}: no JSON behind it") from None
