"""Grammars of calls, in llguidance's Lark syntax: for requests whose output must be calls.

Arguments match the tools' schemas, with one space after each comma and colon, as models write JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from scheduler_service.chat import hermes, listed
from scheduler_service.chat.tools import OfferedTool

LarkRules = dict[str, str]
"""Rules by name; the rule of one call is `call`."""

_COMBINING = frozenset(
    {
        *("$ref", "allOf", "anyOf", "dependentSchemas", "if", "minProperties", "not", "oneOf"),
        *("patternProperties", "unevaluatedProperties"),
    }
)
"""Keywords with which a schema's own properties may not be all that it takes."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
_REMARKS = frozenset({"$comment", "description", "title"})
_BY_NAME = frozenset(
    {
        *("$defs", "$schema", "additionalProperties", "definitions", "description", "properties", "required"),
        *("title", "type", "x-guidance"),
    }
)


class ToolGrammarError(Exception):
    """There is no grammar of a tool's calls. `index`: the tool at fault."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index = index


def hermes_calls(markers: tuple[int, int] | None, tools: Sequence[OfferedTool]) -> LarkRules:
    """A call between markers. `markers`: their token ids; None: they are text."""
    begin, end = (text_rule(hermes.BEGIN), text_rule(hermes.END)) if markers is None else map(_token, markers)
    return {"call": f'{begin} "\\n" object "\\n" {end}', **object_calls(tools, "arguments", "object")}


def object_calls(tools: Sequence[OfferedTool], key: str, name: str = "call") -> LarkRules:
    """A rule `name` of an object with a tool's name, and its arguments under `key`."""
    rules = {name: " | ".join(f"object_{index}" for index in range(len(tools)))}
    for index, tool in enumerate(tools):
        head = text_rule(f'{{"name": "{tool.name}", "{key}": ')
        rules[f"object_{index}"] = f'{head} arguments_{index} "}}"'
    return rules | argument_rules(tools)


def mistral_calls(ids: Mapping[str, int], tools: Sequence[OfferedTool]) -> LarkRules:
    """A call of a newer Mistral model: a marker, a name, a marker, arguments. `ids`: of the markers."""
    rules = {"call": " | ".join(f"call_{index}" for index in range(len(tools)))}
    first, second = _token(ids[listed.MISTRAL]), _token(ids[listed.ARGUMENTS])
    for index, tool in enumerate(tools):
        rules[f"call_{index}"] = f"{text_rule(tool.name)} {second} arguments_{index}"
    rules["call"] = f"{first} ({rules['call']})"
    return rules | argument_rules(tools)


def pythonic_calls(tools: Sequence[OfferedTool]) -> LarkRules:
    """A call with keyword arguments, in the order of the schema's properties. Raises ToolGrammarError."""
    rules = {"call": " | ".join(f"call_{index}" for index in range(len(tools)))}
    for index, tool in enumerate(tools):
        rules |= _keyword_arguments(index, tool)
    return rules


def as_lark(start: str, rules: LarkRules) -> str:
    """The text of a grammar."""
    return "".join(f"{name}: {rule}\n" for name, rule in {"start": start, **rules}.items())


def argument_rules(tools: Sequence[OfferedTool]) -> LarkRules:
    """Rules `arguments_0` and so on, of each tool's arguments as an object."""
    return {
        f"arguments_{index}": value_rule({"type": "object", **tool.parameters})
        for index, tool in enumerate(tools)
    }


def _keyword_arguments(index: int, tool: OfferedTool) -> LarkRules:
    """The rules of a call with keyword arguments. Raises ToolGrammarError."""
    properties, shared = named_arguments(index, tool)
    arguments = {}
    for name, value in properties.items():
        if not name.isidentifier():
            raise ToolGrammarError(index, f"property {name!r} can't be a keyword argument")
        arguments[name] = (text_rule(name + "="), value_rule({**value, **shared}), '""')
    return arguments_in_order(f"call_{index}", tool, arguments, (text_rule(tool.name + "("), '")"'), '", "')


def named_arguments(
    index: int, tool: OfferedTool
) -> tuple[dict[str, Mapping[str, object]], dict[str, object]]:
    """The schemas of arguments that are written one by one, and the definitions that they share.

    Raises ToolGrammarError if the tool's schema restricts its arguments in other ways.
    """
    schema = tool.parameters
    if unknown := sorted(schema.keys() - _BY_NAME):
        raise ToolGrammarError(index, f"{unknown[0]!r} can't be demanded of named arguments")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ToolGrammarError(index, "properties must be an object, required a list")
    if missing := [name for name in required if not isinstance(name, str) or name not in properties]:
        raise ToolGrammarError(index, f"{missing[0]!r} is required, and none of the properties")
    if wrong := [name for name, value in properties.items() if not isinstance(value, dict | bool)]:
        raise ToolGrammarError(index, f"property {wrong[0]!r} must be a schema")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {name: value if isinstance(value, dict) else {} for name, value in properties.items()}, shared


def arguments_in_order(
    call: str,
    tool: OfferedTool,
    arguments: Mapping[str, tuple[str, str, str]],
    around: tuple[str, str],
    comma: str,
) -> LarkRules:
    """The rule `call`, with arguments in the order of the schema's properties; some of them may be left out.

    `arguments`: what stands before each value, its rule, and what stands behind it; `around`: all of them;
    `comma`: between two.
    """
    rules, last = {call: f"{around[0]} {call}_first_0 {around[1]}"}, len(arguments)
    required = tool.parameters.get("required", [])
    assert isinstance(required, list)
    # "first": no argument has been written yet; "next": some have, so that a comma comes before the next one.
    for at, (name, (before, value, behind)) in enumerate(arguments.items()):
        rules[f"{call}_value_{at}"] = value
        argument = f"{before} {call}_value_{at} {behind} {call}_next_{at + 1}"
        first, following = [argument], [f"{comma} {argument}"]
        if name not in required:
            first.append(f"{call}_first_{at + 1}")
            following.append(f"{call}_next_{at + 1}")
        rules[f"{call}_first_{at}"], rules[f"{call}_next_{at}"] = " | ".join(first), " | ".join(following)
    return rules | {f"{call}_first_{last}": '""', f"{call}_next_{last}": '""'}


def value_rule(schema: Mapping[str, object]) -> str:
    """JSON of a schema, with no properties but those that it names unless it says that there may be some."""
    return json_rule(_without_remarks(_closed(schema)))


def json_rule(schema: Mapping[str, object]) -> str:
    """A schema in a grammar."""
    return "%json " + _hidden(json.dumps(schema, separators=(",", ":")))


def text_rule(text: str) -> str:
    """A text in a grammar."""
    return _hidden(json.dumps(text))


def _hidden(text: str) -> str:
    """JSON whose strings do not look like Lark's syntax to whoever searches the text."""
    return text.replace("::", r":\u003a").replace("%", r"\u0025")


def _closed(schema: Mapping[str, object]) -> dict[str, object]:
    """The schema with no properties but those that it names, wherever it does not say that others may be.

    Models invent others; and a key that is not named may be written so that it equals one that is.
    """
    closed = dict(schema)
    if isinstance(items := schema.get("items"), Mapping):
        closed["items"] = _closed(items)
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list) or schema.keys() & _COMBINING:
        return closed
    closed["properties"] = {
        name: _closed(value) if isinstance(value, Mapping) else value for name, value in properties.items()
    }
    if all(isinstance(name, str) and name in properties for name in required):
        closed.setdefault("additionalProperties", False)
    return closed


def _without_remarks(schema: Mapping[str, object]) -> dict[str, object]:
    """The schema without descriptions and titles, which may be longer than all the rest."""
    return {
        key: item if key in _VALUES else _part_without_remarks(item)
        for key, item in schema.items()
        if key not in _REMARKS or not isinstance(item, str)
    }


def _part_without_remarks(part: object) -> object:
    if isinstance(part, Mapping):
        return _without_remarks(part)
    return [_part_without_remarks(item) for item in part] if isinstance(part, list) else part


def _token(token: int) -> str:
    return f"<[{token}]>"
