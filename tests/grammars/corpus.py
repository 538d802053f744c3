"""The corpus: 500 JSON schemas, 100 regular expressions and 50 Lark grammars, fixed before any was tried."""

from __future__ import annotations

import json
from dataclasses import dataclass

from executor_service.grammar.source import GrammarSource
from tests.grammars.larks import larks
from tests.grammars.made_schemas import SchemaMaker
from tests.grammars.regexes import regexes

SCHEMAS = 500


@dataclass(frozen=True)
class CorpusGrammar:
    """One grammar, where it comes from, and its number there or its name."""

    origin: str
    name: str
    source: GrammarSource


def made_schemas(count: int) -> list[CorpusGrammar]:
    """The first so many of the schemas that are drawn."""
    maker = SchemaMaker(1)
    return [_schema("made", str(number), maker.draw()) for number in range(count)]


def all_schemas() -> list[CorpusGrammar]:
    """Public ones, and drawn ones up to SCHEMAS. Needs the `corpus` extra."""
    from tests.grammars.public_schemas import message_schemas, store_schemas

    public = [_schema("messages", name, schema) for name, schema in message_schemas().items()]
    public += [_schema("store", name, schema) for name, schema in store_schemas().items()]
    return public + made_schemas(SCHEMAS - len(public))


def all_regexes() -> list[CorpusGrammar]:
    """The regular expressions."""
    return [CorpusGrammar("regex", str(i), GrammarSource("regex", one)) for i, one in enumerate(regexes())]


def all_larks() -> list[CorpusGrammar]:
    """The Lark grammars."""
    return [CorpusGrammar("lark", str(i), GrammarSource("lark", one)) for i, one in enumerate(larks())]


def _schema(origin: str, name: str, schema: object) -> CorpusGrammar:
    return CorpusGrammar(origin, name, GrammarSource("json_schema", json.dumps(schema)))
