"""JSON that clients wrote: tools are refused by their field, calls reach the template in any case."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler_service.chat.json_object import parse_object
from scheduler_service.text.worker.sent_json import Chat, SentJsonError, grammar_of_calls, parse_chat


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


BAD = (
    "{",
    "[]",
    "1",
    '"x"',
    '{"a": NaN}',
    '{"a": -Infinity}',
    '{"a": 1e999}',
    r'{"a": "\ud800"}',
    nested(65),
)
bad = pytest.mark.parametrize("text", BAD)


def chat(*turns: dict[str, Any], tools: tuple[tuple[str, str, str], ...] = ()) -> Chat:
    sent = {"messages": turns, "arguments": {"x": 1}, "tools": tools, "continues": True, "opens": False}
    return parse_chat(json.dumps(sent).encode())


def calling(*arguments: str) -> dict[str, Any]:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}} for text in arguments
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@bad
def test_a_tools_parameters_must_be_json_that_can_be_used(text: str) -> None:
    tools = (("f", "", "{}"), ("g", "", text))
    numbered = [(3, tools[0]), (1, tools[1])]
    with pytest.raises(SentJsonError) as shown:
        chat(tools=tools)
    with pytest.raises(SentJsonError) as demanded:
        grammar_of_calls(json.dumps(numbered).encode(), "hermes", {}, demanded=True, max_calls=0)
    for caught in (shown, demanded):
        assert caught.value.field == "messages.tools[1].parameters"
        assert len(str(caught.value)) < 300


def test_a_tools_parameters_must_be_the_schema_of_an_object() -> None:
    with pytest.raises(SentJsonError, match="schema of an object"):
        chat(tools=(("f", "", '{"type": "string"}'),))


@bad
def test_arguments_that_are_no_json_object_reach_the_template_as_the_text_that_they_are(text: str) -> None:
    parsed = chat({"role": "user", "content": "x"}, calling("{}", text, text))
    assert [call["function"]["arguments"] for call in parsed.messages[1]["tool_calls"]] == [{}, text, text]
    assert parsed.unparsed == "messages[1].tool_calls[1].arguments"


def test_messages_and_tools_are_what_templates_read() -> None:
    parsed = chat(
        calling('{"b": 1.0, "a": [null]}', ""), tools=(("f", "", '{"type": "object"}'), ("g", "x", ""))
    )
    first, second = (call["function"]["arguments"] for call in parsed.messages[0]["tool_calls"])
    assert (first, second, parsed.unparsed) == ({"b": 1.0, "a": [None]}, {}, "")
    assert (parsed.arguments, parsed.continues, parsed.opens) == ({"x": 1}, True, False)
    assert list(parsed.tools) == [
        {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},
        {
            "type": "function",
            "function": {"name": "g", "description": "x", "parameters": {"type": "object", "properties": {}}},
        },
    ]


def test_an_object_within_the_depth_is_parsed_and_brackets_in_strings_do_not_count() -> None:
    assert json.dumps(parse_object(nested(64))) == nested(64)
    assert parse_object(json.dumps({"a": "[" * 100 + '\\"{'})) == {"a": "[" * 100 + '\\"{'}


def demand(
    style: str, *tools: tuple[int, tuple[str, str, str]], demanded: bool = True, max_calls: int = 0
) -> str:
    return grammar_of_calls(json.dumps(tools).encode(), style, {}, demanded=demanded, max_calls=max_calls)


F, G = (0, ("f", "", "")), (1, ("g-1", "", ""))


def test_the_grammar_of_demanded_calls_is_of_one_call_or_several() -> None:
    assert r"\"name\": \"f\"" in demand("hermes", F, G)
    assert r"\"name\": \"f\"" not in demand("hermes", G, max_calls=1)
    assert "call (" in demand("hermes", F, G)
    assert "call (" not in demand("hermes", F, G, max_calls=1)


def test_the_grammar_of_calls_that_are_not_demanded_is_of_text_too() -> None:
    free = demand("hermes", F, G, demanded=False, max_calls=2)
    assert "TEXT" in free
    assert "{0,2}" in free
    assert "TEXT" not in demand("hermes", F, G, max_calls=2)


def test_what_a_format_can_not_demand_names_the_tool_by_its_index_in_the_request() -> None:
    with pytest.raises(SentJsonError, match="patternProperties") as caught:
        demand("llama3-pythonic", F, (7, ("h", "", '{"patternProperties": {}}')))
    assert caught.value.field == "messages.tools[7].parameters"
