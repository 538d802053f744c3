"""What the default model is asked, so that it writes short texts of a grammar: examples come first.

Without them a model of this size writes about the schema instead, or writes on in it; with them it still
decides by itself where its text ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.chat import Message

from executor_service.grammar.source import GrammarSource

MAX_SHOWN = 1500
"""Characters of a schema that are shown; the rest is for the grammar engine alone."""

_NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
}
_ASK = {
    "json_schema": "Schema: {}\nWrite the shortest JSON that fits.",
    "regex": "Regular expression: {}\nWrite the shortest text that matches.",
    "lark": "Grammar: {}\nWrite one short text.",
}
_EXAMPLES: dict[str, list[tuple[Any, Any]]] = {
    "json_schema": [
        (
            {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name", "age"],
            },
            {"name": "Ann", "age": 33},
        ),
        (
            {
                "type": "object",
                "properties": {
                    "id": {"type": "string"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "meta": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
                "required": ["id"],
            },
            {"id": "a1", "tags": ["x"], "meta": None},
        ),
        (_NODE, {"value": 7, "next": {"value": 12, "next": None}}),
        ({"type": "object", "properties": {"price": {"type": "number"}}}, {"price": 9.5}),
        ({"type": "array", "items": {"type": "string"}}, ["red", "blue"]),
        ({"type": "number"}, 0.25),
    ],
    "regex": [("[a-z]+( [a-z]+)*", "red apples"), (r"-?[0-9]+(\.[0-9]+)?", "12.5"), (".*", "Hello.")],
    "lark": [
        ('start: "a"+ | start "b"', "aab"),
        ('start: "[" [item ("," item)*] "]"\nitem: /[0-9]+/', "[1,20]"),
    ],
}
_ANNOTATIONS = frozenset({"description", "title", "$schema", "$id", "$comment", "examples", "default"})
_DEFINITIONS = ("$defs", "definitions")


def conversation(source: GrammarSource, examples: Sequence[str] = ()) -> list[Message]:
    """Examples as turns of a chat, and the question, with some texts of the grammar if there are any."""
    ask, messages = _ASK[source.kind], list[Message]()
    for shown, answer in _EXAMPLES[source.kind]:
        if source.kind == "json_schema":
            shown, answer = json.dumps(shown), json.dumps(answer)
        messages.append(Message(role="user", content=ask.format(shown)))
        messages.append(Message(role="assistant", content=answer))
    shown = _shown_schema(source.text) if source.kind == "json_schema" else source.text
    messages.append(Message(role="user", content=ask.format(shown)))
    for example in examples:
        messages.append(Message(role="assistant", content=example))
        messages.append(Message(role="user", content="Another one, as short as that."))
    return messages


def _shown_schema(text: str) -> str:
    """Without what only explains, definitions last, not too long."""
    schema = _bare(json.loads(text))
    if isinstance(schema, dict):
        definitions = {key: schema.pop(key) for key in _DEFINITIONS if key in schema}
        schema |= definitions
    return json.dumps(schema, ensure_ascii=False)[:MAX_SHOWN]


def _bare(node: Any) -> Any:
    if isinstance(node, list):
        return [_bare(each) for each in node]
    if isinstance(node, dict):
        return {
            key: _bare(value)
            for key, value in node.items()
            if key not in _ANNOTATIONS or isinstance(value, dict)
        }
    return node
