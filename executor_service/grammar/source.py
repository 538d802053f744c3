"""`GrammarSource`: what a client says that its output must match."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

STACK_BYTES = 128 << 20
"""Of threads that compile. 128 KiB of grammar can be 18,000 rules deep, which takes the library half."""

GrammarKind = Literal["json_schema", "regex", "choices", "lark", "structural_tag"]


UNTRIED = "the grammar engine does not answer; try again"
"""Why a grammar can't be compiled now; it may be compiled later."""


class GrammarInvalid(Exception):
    """The grammar can't be compiled, or not within the limits; the message says why."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """One grammar as text; `text` is empty where there are `choices`."""

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()
    begins_after: int | None = None  # a token id; None: it is the grammar of the whole output


@dataclass(frozen=True, slots=True)
class TaggedPart:
    """A part of free text that must match: from its trigger on, which `begin` starts with, to `end`."""

    trigger: str
    begin: str
    grammar: str | dict[str, Any]  # Lark, or a JSON schema
    end: str


def choices_regex(choices: Iterable[str]) -> str:
    """A regular expression that matches these texts and no others."""
    return "|".join("".join(map(_literal, choice)) for choice in choices)


def tagged_parts(text: str) -> list[TaggedPart]:
    """The parts that a structural tag describes. Raises GrammarInvalid."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarInvalid(f"no JSON: {error}") from None
    if not isinstance(tag, dict) or not tag.keys() <= {"structures", "triggers", "type"}:
        raise GrammarInvalid("an object with structures, triggers and perhaps type, and nothing else")
    triggers, structures = tag.get("triggers"), tag.get("structures")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarInvalid("triggers: a list of texts that are not empty")
    if not isinstance(structures, list) or not structures:
        raise GrammarInvalid("structures: a list that is not empty")
    return [_part(f"structures[{index}]", part, triggers) for index, part in enumerate(structures)]


def _part(field: str, part: object, triggers: list[str]) -> TaggedPart:
    if not isinstance(part, dict) or not part.keys() <= {"begin", "schema", "lark", "end"}:
        raise GrammarInvalid(f"{field}: an object with begin, end, and schema or lark, and nothing else")
    begin, end, schema, lark = part.get("begin"), part.get("end", ""), part.get("schema"), part.get("lark")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarInvalid(f"{field}: begin and end must be texts")
    by_schema, by_lark = isinstance(schema, dict) and lark is None, isinstance(lark, str) and schema is None
    if not (by_schema or by_lark):
        raise GrammarInvalid(f"{field}: either schema, an object, or lark, a text")
    trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if trigger is None:
        raise GrammarInvalid(f"{field}.begin: starts with none of the triggers")
    return TaggedPart(trigger, begin, schema if isinstance(schema, dict) else str(lark), end)


def _literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
