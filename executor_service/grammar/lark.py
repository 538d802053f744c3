"""Lark grammars as the grammar engine reads them: the JSON schemas in them are checked as others are."""

from __future__ import annotations

import json

from executor_service.grammar.ambiguity import count_rules
from executor_service.grammar.narrowed_schema import engine_schema
from executor_service.grammar.source import GrammarInvalid

_JSON = "%json"
_DECODER = json.JSONDecoder()
_MAX_ROW_WORK = 2000
"""One rule "e" with 20 alternatives "e op e" has 860; of 50 grammars of the corpus none has 30."""


def engine_lark(text: str, warnings: list[str]) -> str:
    """A grammar that the engine reads as the given one was meant. Raises GrammarInvalid.

    What has no effect is added to `warnings`.
    """
    if text.lstrip().startswith("{"):  # the library would read it as grammars in a JSON format of its own
        raise GrammarInvalid("JSON, and no Lark grammar")
    parts, at = [], 0
    while (found := text.find(_JSON, at)) >= 0:
        schema, end = _schema(text, found + len(_JSON), warnings)
        parts += [text[at:found], _JSON, " ", schema]
        at = end
    read = "".join([*parts, text[at:]])
    if "::" in read:  # they can be made to expand without end, and no limit counts that
        raise GrammarInvalid('rules with parameters (::) are not offered; in a text, write ":" ":"')
    if (work := count_rules(read).row_work) > _MAX_ROW_WORK:
        raise GrammarInvalid(
            "for each rule its alternatives times the places where it stands: at most "
            f"{_MAX_ROW_WORK} in all, has {work}"
        )
    return read


def _schema(text: str, at: int, warnings: list[str]) -> tuple[str, int]:
    """The JSON schema that begins at `at`, checked, and where it ends.

    What is looked for in Lark is escaped in the schema's strings, so that it is found in Lark alone.
    """
    begin = len(text) - len(text[at:].lstrip(" \t\r\n"))
    try:
        schema, end = _DECODER.raw_decode(text, begin)
        checked = json.dumps(engine_schema(schema, warnings))
    except (ValueError, RecursionError):
        raise GrammarInvalid(f"{_JSON}: no JSON after it") from None
    return checked.replace("::", r":\u003a").replace(_JSON, r"\u0025json"), end
