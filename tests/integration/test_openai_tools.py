"""Tools and reasoning of the OpenAI API, of a model whose template has both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.integration.scheduler.test_chat_output import CALL, PARAMETERS, THINK_END, tokenizer
from tests.support.doctored_executor import doctored_stack
from tests.support.openai_door import Answer, Door, serving_door
from tests.support.stack import Stack
from tests.unit.scheduler_shell.tool_styles import QWEN

NOW = {"type": "function", "function": {"name": "now", "strict": True}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
MANY = {"logit_bias": {str(CALL): 6.0, str(THINK_END): 6.0}, "seed": 3, "temperature": 1.0, "max_tokens": 300}
"""Of a model that is free, and wants to make calls."""
READS_REASONING = QWEN.replace(
    "{%- if message.content %}",
    "{%- if message.reasoning_content is string %}{{- '\\n' + message.reasoning_content }}{%- endif %}"
    "{%- if message.content %}",
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("tools")
    with doctored_stack(directory, chat_template=READS_REASONING, tokenizer_json=tokenizer()) as stack:
        yield stack


@pytest.fixture
async def door(stack: Stack) -> AsyncIterator[Door]:
    async with serving_door(stack.scheduler.address) as door:
        yield door


async def ask(door: Door, **fields: Any) -> Answer:
    """A chat with both tools, without reasoning."""
    without = {"enable_thinking": False}
    answer = await door.chat("hello", **{"tools": [WEATHER, NOW], "chat_template_kwargs": without, **fields})
    assert answer.status == 200, answer.body
    return answer


def calls(answer: Answer) -> list[tuple[str, Any]]:
    """(name, arguments) of each."""
    found = answer.json["choices"][0]["message"].get("tool_calls", [])
    return [(one["function"]["name"], one["function"]["arguments"]) for one in found]


def check_strict(arguments: str) -> None:
    given = json.loads(arguments)
    assert given.keys() == {"city", "days"}
    assert len(given["city"]) <= 6
    assert given["days"] in (1, 2)


async def test_calls_of_a_strict_tool_match_its_schema_though_the_model_is_free(door: Door) -> None:
    weather = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [weather]}}
    answer = await ask(door, tool_choice=allowed, **MANY)
    found = calls(answer)
    assert found
    for name, arguments in found:
        assert name == "weather"
        check_strict(arguments)


async def test_parallel_tool_calls_false_bounds_an_answer_to_one_call(door: Door) -> None:
    assert len(calls(await ask(door, **MANY))) > 1
    for choice in ("auto", "required"):
        assert len(calls(await ask(door, parallel_tool_calls=False, tool_choice=choice, **MANY))) == 1
    assert calls(await ask(door, parallel_tool_calls=False, tool_choice="none", **MANY)) == []


async def test_a_demanded_call_is_of_the_tool_that_is_named_and_streams_its_arguments(door: Door) -> None:
    named: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
    fields = {"tool_choice": named, "parallel_tool_calls": False, "seed": 5, "temperature": 1.0}
    [(name, arguments)] = calls(await ask(door, **fields))
    assert name == "weather"
    check_strict(arguments)
    pieces: list[str] = []
    ends = []
    for event in (await ask(door, stream=True, **fields)).events:
        for choice in event["choices"]:
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in choice["delta"].get("tool_calls", ()):
                assert ("id" in call) == (not pieces)
                pieces.append(call["function"]["arguments"])
    assert len(pieces) > 2
    assert "".join(pieces) == arguments
    assert ends == ["tool_calls"]


async def test_an_answer_with_calls_and_reasoning_can_be_sent_back_as_it_came(door: Door) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "chat_template_kwargs": {"enable_thinking": True}}
    message = (await ask(door, **fields, **MANY)).json["choices"][0]["message"]
    assert message["reasoning_content"]
    answers = [
        {"role": "tool", "tool_call_id": one["id"], "content": "20 C"} for one in message["tool_calls"]
    ]
    turns = [{"role": "user", "content": "hello"}, message, *answers]
    body = {"messages": turns, "tools": [WEATHER, NOW], "max_tokens": 4}
    with_reasoning = await door.ask("/v1/chat/completions", body)
    assert with_reasoning.status == 200, with_reasoning.body
    del message["reasoning_content"]
    without = await door.ask("/v1/chat/completions", body)
    read = [one.json["usage"]["prompt_tokens"] for one in (with_reasoning, without)]
    assert read[0] > read[1]  # the model sees it


async def test_a_response_with_calls_and_reasoning_can_be_sent_back_as_it_came(door: Door) -> None:
    functions: list[Any] = [WEATHER["function"], NOW["function"]]
    tools: list[Any] = [{"type": "function", **one} for one in functions]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": "required", **MANY}
    del fields["max_tokens"]
    body = {"input": "hello", "max_output_tokens": 300, "chat_template_kwargs": {"enable_thinking": True}}
    answer = await door.ask("/v1/responses", {**body, **fields})
    assert answer.status == 200, answer.body
    output = answer.json["output"]
    kinds = [one["type"] for one in output]
    assert kinds[0] == "reasoning"
    assert "function_call" in kinds
    results = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "20 C"}
        for one in output
        if one["type"] == "function_call"
    ]
    back = {"tools": tools, "max_output_tokens": 4}
    turns = [{"role": "user", "content": "hello"}, *output, *results]
    read = []
    for items in (turns, [one for one in turns if one.get("type") != "reasoning"]):
        more = await door.ask("/v1/responses", {"input": items, **back})
        assert more.status == 200, more.body
        read.append(more.json["usage"]["input_tokens"])
    assert read[0] > read[1]  # the model sees the reasoning


async def test_what_does_not_go_with_tools_is_refused_by_name(door: Door) -> None:
    object_ = {"type": "json_object"}
    for fields, param in (
        ({"tools": [NOW], "response_format": object_}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [{"type": "function", "function": {"name": "x", "strikt": True}}]},
         "tools[0].function.strikt"),
    ):  # fmt: skip
        answer = await door.chat("x", **fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
