"""Grammars of calls between tags (`chat.tagged`): values that are texts have no quotation marks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from scheduler_service.chat.argument_texts import argument_as_json, resolved, text_arguments
from scheduler_service.chat.call_grammar import (
    LarkRules,
    ToolGrammarError,
    arguments_in_order,
    named_arguments,
    text_rule,
    value_rule,
)
from scheduler_service.chat.tagged import TagSyntax
from scheduler_service.chat.tools import OfferedTool

_REMARKS = frozenset({"title", "description", "default", "examples", "$comment", "$defs", "definitions"})
_MAX_NAME = 128  # characters of an argument's name
_LENGTHS = {"minLength": "0", "maxLength": ""}


def tagged_calls(
    syntax: TagSyntax, markers: tuple[int, int] | None, tools: Sequence[OfferedTool]
) -> LarkRules:
    """A call between markers. `markers`: their token ids; None: they are text. Raises ToolGrammarError."""
    begin, end = (
        map(text_rule, (syntax.begin, syntax.end)) if markers is None else (f"<[{id_}]>" for id_ in markers)
    )
    break_ = '"\\n" ' if syntax.name[0] else ""
    calls = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules = {"call": f"{begin} {break_}({calls}) {end}"}
    before = _escaped(_around_value(syntax)[0])
    rules["KEY"] = f'/{_escaped(syntax.key[0])}[^<>"\\s]{{1,64}}{before}/'
    rules["VALUE"] = _terminal("0,", syntax)
    for index, tool in enumerate(tools):
        rules |= _call(syntax, index, tool)
    return rules


def _call(syntax: TagSyntax, index: int, tool: OfferedTool) -> LarkRules:
    call = f"call_{index}"
    head = text_rule(f"{syntax.name[0]}{tool.name}{syntax.name[1]}\n")
    around = head, text_rule(f"{syntax.tail}\n") if syntax.tail else '""'
    if "properties" not in tool.parameters and tool.parameters.keys() - _REMARKS <= {"type"}:
        return {call: f"{around[0]} (KEY VALUE)* {around[1]}"}
    properties, shared = named_arguments(index, tool)
    texts, arguments, terminals = text_arguments(tool.parameters), {}, {}
    before, behind = _around_value(syntax)
    for at, (name, schema) in enumerate(properties.items()):
        if not name or syntax.key[1][0] in name or len(name) > _MAX_NAME:
            raise ToolGrammarError(index, f"property {name[:64]!r} can't stand between tags")
        opening = text_rule(syntax.key[0] + name + before)
        if name not in texts:
            arguments[name] = opening, value_rule({**schema, **shared}), text_rule(behind)
            continue
        try:
            written, lengths = _texts(schema, tool.parameters, texts[name])
            if any(syntax.value[1] in text for text in written):
                raise ValueError(f"a value has {syntax.value[1]} in it")
        except ValueError as error:
            raise ToolGrammarError(index, f"property {name!r}, which may be a text: {error}") from None
        choices = [text_rule(text + behind) for text in written]
        if lengths is not None:
            choices.append(f"TEXT_{index}_{at}")
            terminals[choices[-1]] = _terminal(lengths, syntax)
        arguments[name] = opening, " | ".join(choices), '""'
    return arguments_in_order(call, tool, arguments, around, '""') | terminals


def _around_value(syntax: TagSyntax) -> tuple[str, str]:
    """What stands between an argument's name and its value, and behind that."""
    return (
        syntax.key[1] + ("\n" if syntax.value[0] else "") + syntax.value[0] + syntax.padding,
        f"{syntax.padding}{syntax.value[1]}\n",
    )


def _terminal(lengths: str, syntax: TagSyntax) -> str:
    """A text of a value with what stands behind it. The lexer takes the longest terminal that there is."""
    tag = _escaped(syntax.value[1])
    return f"/(?s:.{{{lengths}}}){_escaped(_around_value(syntax)[1])}/ & ~/(?s:.*){tag}(?s:.*){tag}(?s:.*)/"


def _escaped(text: str) -> str:
    """A text in a regular expression of Lark's syntax."""
    return r"\n".join(map(re.escape, text.split("\n"))).replace("/", r"\/")


def _texts(
    schema: object, root: Mapping[str, object], others: frozenset[str]
) -> tuple[list[str], str | None]:
    """What a value is that may be a text: some texts as they are written, and the length of any other one.

    A length is written as in a regular expression; None: there is no other one. Raises ValueError.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        raise ValueError("it has no schema")
    keys = schema.keys() - _REMARKS
    if "enum" in schema or "const" in schema:
        if keys - {"enum", "const", "type"} or {"enum", "const"} <= keys:
            raise ValueError("enum and const can't be demanded beside others")
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise ValueError("enum must be a list of values")
        written = [value if isinstance(value, str) else json.dumps(value) for value in values]
        for value, text in zip(values, written, strict=True):
            if json.loads(argument_as_json(text, others)) != value:
                raise ValueError(f"{text!r} would be read as another value")
        return written, None
    if keys == {"anyOf"}:
        parts = [resolved(part, root) for part in schema["anyOf"]]
        own = [part for part in parts if not (isinstance(part, Mapping) and part.get("type") == "null")]
        if len(own) != 1 or len(own) == len(parts):
            raise ValueError("anyOf can only be demanded of a text and null")
        return _texts(own[0], root, others)
    if unknown := sorted(keys - {"type", *_LENGTHS}):
        raise ValueError(f"{unknown[0]!r} can't be demanded of it")
    lengths = [schema.get(key, default) for key, default in _LENGTHS.items()]
    if any(
        isinstance(length, bool) or not (isinstance(length, int) or length in ("0", "")) for length in lengths
    ):
        raise ValueError("lengths must be integers")
    if schema.get("type") != "string" and keys != {"type"} and others != {"null"}:
        raise ValueError("a length can only be demanded of a text")
    return (["null"] if others == {"null"} else []), ",".join(map(str, lengths))
