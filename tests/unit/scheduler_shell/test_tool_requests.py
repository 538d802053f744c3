"""Tools, calls and demanded calls of a request: checked field by field, and named where they are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.chat.formats import FORMATS
from scheduler_service.core.request import OutputGrammar
from scheduler_service.errors import ErrorReason
from scheduler_service.rpc.codec.requests import check_request
from scheduler_service.streams.request import ChatPrompt, CheckedRequest
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.models_made_here import DRAFTING
from tests.unit.scheduler_shell.models_made_here import MODEL as PLAIN

HERMES = replace(PLAIN, tool_format=FORMATS["hermes"]({}), max_grammar_bytes=2000)
PYTHONIC = replace(HERMES, tool_format=FORMATS["llama3-pythonic"]({}))
REQUIRED = pb.TOOL_CHOICE_MODE_REQUIRED
F, G = pb.Tool(name="f", parameters='{"type": "object"}'), pb.Tool(name="g-1", description="x")


def asks(
    *tools: pb.Tool, choice: pb.ToolChoice | None = None, turns: list[pb.Message] | None = None, **fields: Any
) -> pb.GenerateRequest:
    turns = turns or [pb.Message(role="user", content="x")]
    return pb.GenerateRequest(messages=pb.Messages(messages=turns, tools=tools, tool_choice=choice), **fields)


def called(**fields: Any) -> pb.GenerateRequest:
    return asks(turns=[pb.Message(role="assistant", tool_calls=[pb.ToolCall(**fields)])])


def check(message: pb.GenerateRequest, model: Any = HERMES) -> CheckedRequest:
    return check_request(message, model, DRAFTING)


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


BAD: list[tuple[str, pb.GenerateRequest]] = [
    ("messages.tools", asks(*[pb.Tool(name=f"f{i}") for i in range(129)])),
    ("messages.tools", asks(pb.Tool(name="f", description="x" * 1000))),
    ("messages[0].content", asks(pb.Tool(name="f", description="x" * 999))),
    *(("messages.tools[0].name", asks(pb.Tool(name=name))) for name in ("", "a b", "é", "x" * 65, "a\n")),
    ("messages.tools[1].name", asks(F, F)),
    *(
        ("messages.tools[0].parameters", asks(pb.Tool(name="f", parameters=text)))
        for text in ("{", "[]", "1", '"x"', '{"a": NaN}', '{"a": 1e999}', r'{"a": "\ud800"}', nested(65))
    ),
    ("messages.tools[0].parameters", asks(pb.Tool(name="f", parameters='{"type": "string"}'))),
    ("messages.tool_choice.mode", asks(F, choice=pb.ToolChoice(mode=9))),  # type: ignore[arg-type]
    ("messages.tool_choice.mode", asks(choice=pb.ToolChoice(mode=REQUIRED))),
    ("messages.tool_choice.name", asks(F, choice=pb.ToolChoice(name="f"))),
    ("messages.tool_choice.name", asks(F, choice=pb.ToolChoice(mode=REQUIRED, name="h"))),
    (
        "messages.tools",
        asks(*[pb.Tool(name=f"f{i}") for i in range(40)], choice=pb.ToolChoice(mode=REQUIRED)),
    ),
    ("grammar", asks(F, grammar=pb.Grammar(regex="a"))),
    ("grammar", asks(F, choice=pb.ToolChoice(mode=REQUIRED), grammar=pb.Grammar(regex="a"))),
    (
        "stop.ignore_eos",
        asks(F, choice=pb.ToolChoice(mode=REQUIRED), stop=pb.StopConditions(ignore_eos=True)),
    ),
    ("messages[0].tool_calls[0].name", called(name="a b")),
    ("messages[0].tool_calls[0].id", called(name="f", id="x" * 129)),
    *(
        ("messages[0].tool_calls[0].arguments", called(name="f", arguments=text))
        for text in ("{", "[]", '{"a": Infinity}', nested(70))
    ),
    ("messages[0].content", called(name="f", arguments=json.dumps({"a": "x" * 1000}))),
    ("messages[0].tool_call_id", asks(turns=[pb.Message(role="tool", tool_call_id="x" * 129)])),
]


@pytest.mark.parametrize(("field", "message"), BAD)
def test_a_bad_field_is_refused_by_its_name(field: str, message: pb.GenerateRequest) -> None:
    with raises(ErrorReason.INVALID_REQUEST) as caught:
        check(message)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("messages.tools", asks(F)),
        ("messages.tool_choice", asks(choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE))),
        ("messages[0].tool_calls", called(name="f")),
        ("messages[0].tool_call_id", asks(turns=[pb.Message(role="tool", tool_call_id="1")])),
    ],
)
def test_without_a_format_tools_are_not_offered_and_the_error_says_what_to_set(
    field: str, message: pb.GenerateRequest
) -> None:
    with raises(ErrorReason.UNSUPPORTED, match="tool-format") as caught:
        check(message, PLAIN)
    assert caught.value.field == field


def test_demanded_calls_need_grammars() -> None:
    with raises(ErrorReason.UNSUPPORTED, match="no grammars"):
        check(asks(F, choice=pb.ToolChoice(mode=REQUIRED)), replace(HERMES, max_grammar_bytes=0))


def prompt(message: pb.GenerateRequest) -> ChatPrompt:
    checked = check(message).prompt
    assert isinstance(checked, ChatPrompt)
    return checked


def test_messages_and_tools_are_what_templates_read() -> None:
    turns = [
        pb.Message(
            role="assistant", tool_calls=[pb.ToolCall(id="1", name="f", arguments='{"b": 1.0, "a": [null]}')]
        ),
        pb.Message(role="tool", content="2", tool_call_id="1", name="f"),
        pb.Message(role="assistant", tool_calls=[pb.ToolCall(name="f")]),
    ]
    chat = prompt(asks(F, G, turns=turns))
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": {"b": 1.0, "a": [None]}},
    }
    empty = {"id": "", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert chat.messages == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "f", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": [empty]},
    )
    assert [tool.for_template()["function"] for tool in chat.tools] == [
        {"name": "f", "description": "", "parameters": {"type": "object"}},
        {"name": "g-1", "description": "x", "parameters": {"type": "object", "properties": {}}},
    ]


def test_the_choice_none_offers_no_tools_and_leaves_room_for_a_grammar() -> None:
    none = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)
    assert prompt(asks(F, choice=none)).tools == ()
    checked = check(asks(F, choice=none, grammar=pb.Grammar(regex="a")))
    assert checked.sampling.grammar == OutputGrammar("regex", "a")


@pytest.mark.parametrize("mode", [pb.TOOL_CHOICE_MODE_UNSPECIFIED, pb.TOOL_CHOICE_MODE_AUTO])
def test_the_choice_auto_leaves_the_model_free(mode: Any) -> None:
    checked = check(asks(F, G, choice=pb.ToolChoice(mode=mode)))
    assert checked.sampling.grammar is None
    assert len(prompt(asks(F, G)).tools) == 2


def test_demanded_calls_are_a_grammar_of_the_tools_that_may_be_called() -> None:
    free = check(asks(F, G, choice=pb.ToolChoice(mode=REQUIRED))).sampling.grammar
    named = check(asks(F, G, choice=pb.ToolChoice(mode=REQUIRED, name="g-1"))).sampling.grammar
    assert free is not None
    assert named is not None
    assert '\\"name\\": \\"f\\"' in free.text
    assert '\\"name\\": \\"f\\"' not in named.text
    assert "call (" in free.text
    assert "call (" not in named.text
    assert prompt(asks(F, G, choice=pb.ToolChoice(mode=REQUIRED, name="g-1"))).tools[0].name == "f"


def test_what_a_format_can_not_demand_names_the_tool() -> None:
    odd = pb.Tool(name="h", parameters='{"patternProperties": {}}')
    with raises(ErrorReason.INVALID_REQUEST) as caught:
        check(asks(F, odd, choice=pb.ToolChoice(mode=REQUIRED, name="h")), PYTHONIC)
    assert caught.value.field == "messages.tools[1].parameters"
    check(asks(F, odd), PYTHONIC)


def test_a_continuation_says_how_much_reasoning_and_arguments_were_received() -> None:
    message = asks(F, sampling=pb.SamplingParams(seed=1))
    one = pb.ContinuedCompletion(token_ids=[1, 2], text_bytes=1, reasoning_bytes=2, argument_bytes=[3, 0])
    message.continuation.completions.append(one)
    message.continuation.model_fingerprint = HERMES.fingerprints.model
    message.continuation.sampler = HERMES.fingerprints.sampler
    continuation = check(message).continuation
    assert continuation is not None
    (received,) = continuation.received
    assert (received.text, received.reasoning, received.arguments) == (1, 2, (3, 0))
    one.argument_bytes.append(1)
    message.continuation.completions[0].CopyFrom(one)
    with raises(ErrorReason.INVALID_REQUEST, match="more calls than there are tokens"):
        check(message)
