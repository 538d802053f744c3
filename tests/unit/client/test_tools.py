"""Tools and calls on their way to the model and back."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Any, Literal

import paceline
import pytest
from paceline import conversations, requests, responses
from paceline.chat import Message, Tool, ToolCall, ToolCallDelta, ToolChoice
from paceline.errors import InvalidOutput, InvalidRequest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import Completion, Delta
from pydantic import BaseModel

from examples import tool_loop
from tests.unit.client.answering import Run, answering, both
from tests.unit.client.conftest import Served

HELLO = [Message("user", "hello")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def weather(city: str, unit: Literal["C", "F"] = "C") -> str:
    """Today's weather in a city."""
    return f"20 {unit} in {city}"


class Weather(BaseModel):
    """Today's weather in a city."""

    city: str
    unit: Literal["C", "F"] = "C"


def chat(**options: Any) -> pb.Messages:
    return requests.generate_request(None, HELLO, None, options).messages


@pytest.mark.parametrize("tool", [weather, Weather])
def test_a_function_or_a_model_is_a_tool(tool: Any) -> None:
    [wire] = chat(tools=[tool]).tools
    assert (wire.name, wire.description) == (tool.__name__, "Today's weather in a city.")
    schema = json.loads(wire.parameters)
    assert schema["required"] == ["city"]
    assert schema["properties"]["unit"]["enum"] == ["C", "F"]
    assert schema["additionalProperties"] is False


class Undescribed(BaseModel):
    city: str


def test_a_model_without_a_docstring_has_no_description() -> None:
    """Nor that of pydantic's base class."""
    assert chat(tools=[Undescribed]).tools[0].description == ""


@pytest.mark.parametrize(
    "tool",
    [
        Tool("weather", "of today", SCHEMA),
        Tool("weather", "of today", json.dumps(SCHEMA)),
        {"name": "weather", "description": "of today", "parameters": SCHEMA},
        {
            "type": "function",
            "function": {"name": "weather", "description": "of today", "parameters": SCHEMA, "strict": None},
        },
    ],
)
def test_a_tool_is_a_tool_or_a_mapping_in_either_form(tool: Any) -> None:
    wanted = pb.Tool(name="weather", description="of today", parameters=json.dumps(SCHEMA))
    assert list(chat(tools=[tool]).tools) == [wanted]


@pytest.mark.parametrize(
    "tool", [Tool("now"), {"name": "now"}, {"type": "function", "function": {"name": "now"}}]
)
def test_a_tool_without_parameters_takes_no_arguments(tool: Any) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    assert json.loads(chat(tools=[tool]).tools[0].parameters) == schema


def test_a_strict_tool_says_so() -> None:
    strict = {"type": "function", "function": {"name": "weather", "strict": True}}
    assert [one.strict for one in chat(tools=[Tool("weather", strict=True), strict, weather]).tools] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("choice", "wire"),
    [
        ("auto", pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_AUTO)),
        ("none", pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)),
        ("required", pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)),
        ("weather", pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED, name="weather")),
        (
            {"type": "function", "function": {"name": "weather"}},
            pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED, name="weather"),
        ),
        (ToolChoice(max_calls=1), pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_AUTO, max_calls=1)),
        (
            {"mode": "required", "names": ["weather"], "max_calls": 2},
            pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED, names=["weather"], max_calls=2),
        ),
    ],
)
def test_a_choice_is_a_mode_or_a_name(choice: Any, wire: pb.ToolChoice) -> None:
    assert chat(tools=[weather], tool_choice=choice).tool_choice == wire


class Opaque:
    pass


def untyped(thing: Opaque) -> None: ...


def positional(*things: int) -> None: ...


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"tools": weather}, TypeError, "^tools must be a sequence"),
        ({"tools": [weather, 3]}, TypeError, r"^tools\[1\] must be a Tool or a mapping, got int"),
        ({"tools": [untyped]}, TypeError, r"^tools\[0\]: untyped\(\)"),
        ({"tools": [partial(weather)]}, TypeError, r"^tools\[0\]: partial has no name"),
        ({"tools": [positional]}, TypeError, r"^tools\[0\]: positional\(\)"),
        ({"tools": [{"description": "x"}]}, InvalidRequest, r"^tools\[0\] has no 'name'"),
        ({"tools": [{"name": "x", "strikt": True}]}, InvalidRequest, r"^tools\[0\] has an unknown field"),
        ({"tools": [{"name": "\ud800"}]}, InvalidRequest, r"^tools\[0\].name: "),
        ({"tools": [Tool("x", parameters={"a": Opaque()})]}, TypeError, r"^tools\[0\].parameters: "),
        ({"tool_choice": 3}, InvalidRequest, "^tool_choice: expected auto, none, required or a tool's name"),
        ({"tool_choice": {"type": "function"}}, InvalidRequest, "^tool_choice"),
        ({"tool_choice": ""}, InvalidRequest, "^tool_choice: expected"),
        ({"tool_choice": ToolChoice("any")}, InvalidRequest, "^tool_choice.mode: expected auto"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_index(
    options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        chat(**options)


def test_a_function_without_pydantic_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(TypeError, match=r"weather\(\) is a function: .* pip install pydantic"):
        chat(tools=[weather])


CALLS = [pb.ToolCall(id="1", name="weather", arguments='{"city": "Ürzig"}'), pb.ToolCall(id="2", name="now")]


def test_the_answer_and_the_results_go_back_as_turns() -> None:
    calls = (ToolCall("1", "weather", '{"city": "Ürzig"}'), ToolCall("2", "now", ""))
    answer = Completion(0, "Well.", (), (), None, tool_calls=calls)
    turns = [answer.message(), calls[0].answer({"°C": 20}), calls[1].answer("noon")]
    assert list(conversations.chat_messages(turns).messages) == [
        pb.Message(role="assistant", content="Well.", tool_calls=CALLS),
        pb.Message(role="tool", content='{"°C": 20}', name="weather", tool_call_id="1"),
        pb.Message(role="tool", content="noon", name="now", tool_call_id="2"),
    ]


def test_turns_may_be_mappings_as_in_openais_api() -> None:
    turns: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Ürzig"}},
                },
                {"id": "2", "name": "now", "arguments": ""},
            ],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "2"},
    ]
    assert list(conversations.chat_messages(turns).messages) == [
        pb.Message(role="assistant", tool_calls=CALLS),
        pb.Message(role="tool", content="noon", tool_call_id="2"),
    ]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "tool", "content": "x", "refusal": "no"}, r"^messages\[0\] has an unknown field 'refusal'"),
        ({"role": "assistant", "tool_calls": []}, r"^messages\[0\] has no 'content'"),
        (
            {"role": "assistant", "tool_calls": [{"kind": 1}]},
            r"^messages\[0\].tool_calls\[0\] has an unknown",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "\ud800"}]}, r"^messages\[0\].tool_calls\[0\].id: "),
    ],
)
def test_a_turn_with_anything_else_is_refused_by_its_place(turn: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        conversations.chat_messages([turn])


DELTAS = [
    pb.Delta(reasoning="Hm"),
    pb.Delta(reasoning="m", text="Let "),
    pb.Delta(
        text="me see.",
        tool_calls=[
            pb.ToolCallDelta(id="1", name="weather", arguments='{"city": '),
            pb.ToolCallDelta(arguments='"Ürzig"}'),
            pb.ToolCallDelta(index=1, id="2", name="now"),
        ],
    ),
]
END = pb.Finished(reason=pb.FINISH_REASON_STOP, eos_token_id=2, usage=pb.Usage(reasoning_tokens=2))


@both
async def test_reasoning_and_calls_come_beside_the_text_streamed_or_not(run: Run) -> None:
    stream = [*(pb.GenerateResponse(delta=delta) for delta in DELTAS), pb.GenerateResponse(finished=END)]
    reply = pb.GenerateUnaryResponse(
        completions=[pb.Completion(text="Let me see.", reasoning="Hmm", tool_calls=CALLS, finished=END)]
    )

    async with answering("Generate", *stream) as address:
        [collected] = await run(address, lambda client: client.generate("x").collect())
    async with answering("GenerateUnary", reply) as address:
        [completed] = await run(address, lambda client: client.completions("x"))
    assert collected == completed
    assert (collected.text, collected.reasoning) == ("Let me see.", "Hmm")
    assert [(call.id, call.name) for call in collected.tool_calls] == [("1", "weather"), ("2", "now")]
    assert weather(**collected.tool_calls[0].parsed) == "20 C in Ürzig"
    assert collected.finished.usage.reasoning_tokens == 2


@pytest.mark.parametrize(
    ("question", "result"),
    [
        ('{"left": 17, "operation": "*", "right": 23}', "391.0"),
        ('{"left": 1, "operation": "/", "right": 0}', '{"error": "float division by zero"}'),
        ('{"left": 17}', '"error": "2 validation errors'),
    ],
)
async def test_the_example_gives_each_result_back_to_the_model(
    served: Served, question: str, result: str
) -> None:
    def use() -> list[Message]:
        with paceline.Client(served.address) as client:
            return tool_loop.converse(client, question, [tool_loop.calculate])

    turns = await asyncio.to_thread(use)
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "assistant"]
    assert result in turns[2].content
    assert (turns[2].tool_call_id, turns[2].name) == ("0", "calculate")
    first, second = served.fake.requests
    assert list(second.messages.messages)[:1] == list(first.messages.messages)
    assert second.messages.messages[1].tool_calls[0].arguments == question


async def test_the_example_ends_with_a_call_that_was_cut_off(served: Served) -> None:
    def use() -> None:
        with paceline.Client(served.address) as client:
            tool_loop.converse(client, '{"left": ', [tool_loop.calculate])

    with pytest.raises(InvalidOutput, match="the arguments of 'calculate' are incomplete"):
        await asyncio.to_thread(use)
    assert len(served.fake.requests) == 1


async def test_deltas_have_the_parts_of_calls_as_they_came() -> None:
    event = responses.event(pb.GenerateResponse(delta=DELTAS[2]))
    assert isinstance(event, Delta)
    assert event.tool_calls[1:] == (ToolCallDelta(0, "", "", '"Ürzig"}'), ToolCallDelta(1, "2", "now", ""))
