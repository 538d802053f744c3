"""Checking a request takes a bounded number of operations of the event loop, whatever the request repeats."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.struct_pb2 import ListValue, Struct, Value
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.chat.formats import FORMATS
from scheduler_service.errors import ErrorReason
from scheduler_service.rpc.codec.chat import MAX_ARGUMENT_VALUES, MAX_CALLS, MAX_PARTS
from scheduler_service.rpc.codec.requests import check_request
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.models_made_here import DRAFTING, LIMITS
from tests.unit.scheduler_shell.models_made_here import MODEL as SMALL

MODEL = replace(
    SMALL,
    tool_format=FORMATS["hermes"]({}),
    max_grammar_bytes=1000,
    limits=replace(LIMITS, max_prompt_bytes=1 << 20),
)
COUNT = 20_000
MAX_OPERATIONS = 12 * MAX_ARGUMENT_VALUES


def chatting(*turns: pb.Message, **options: Any) -> pb.GenerateRequest:
    turns = turns or (pb.Message(role="user", content="x"),)
    return pb.GenerateRequest(messages=pb.Messages(messages=turns, **options))


def arguments(count: int, value: Value | None = None) -> Struct:
    """A variable that is a list of so many values."""
    values = ListValue(values=[value or Value(bool_value=True)])
    return Struct(fields={"x": Value(list_value=ListValue.FromString(values.SerializeToString() * count))})


def parts(count: int) -> pb.Message:
    part = pb.Message(parts=[pb.ContentPart(text="")]).SerializeToString()
    return pb.Message.FromString(pb.Message(role="user").SerializeToString() + part * count)


def calls(count: int) -> pb.Message:
    return pb.Message(role="assistant", tool_calls=[pb.ToolCall(name="f")] * count)


def operations(call: Callable[[], object]) -> int:
    """The calls of functions, Python's and others, while `call` runs."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("messages.template_arguments", chatting(template_arguments=arguments(COUNT))),
        (
            "messages.template_arguments",
            chatting(template_arguments=arguments(COUNT, Value(list_value=ListValue()))),
        ),
        (
            "messages.template_arguments",
            chatting(template_arguments=Struct(fields={str(at): Value() for at in range(COUNT)})),
        ),
        ("messages[0].parts", chatting(parts(COUNT))),
        ("messages[16].parts", chatting(*[parts(COUNT // 320)] * 320)),
        ("messages[8].tool_calls", chatting(*[calls(120)] * 200)),
        ("messages", chatting(*[pb.Message(role="user")] * COUNT)),
        ("messages.tools", chatting(tools=[pb.Tool(name="f")] * COUNT)),
        ("stop.strings", pb.GenerateRequest(text="x", stop=pb.StopConditions(strings=["x"] * COUNT))),
        ("stop.token_ids", pb.GenerateRequest(text="x", stop=pb.StopConditions(token_ids=[1] * COUNT))),
        (
            "sampling.logit_bias",
            pb.GenerateRequest(
                text="x", sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(COUNT), 1.0))
            ),
        ),
    ],
)
def test_what_is_repeated_too_often_is_refused_before_it_is_walked_through(
    field: str, message: pb.GenerateRequest
) -> None:
    def check() -> None:
        with raises(ErrorReason.INVALID_REQUEST) as caught:
            check_request(message, MODEL, DRAFTING)
        assert caught.value.field == field

    assert operations(check) < MAX_OPERATIONS


JSON = '{"x": [' + ", ".join(["[]"] * COUNT) + "]}"


@pytest.mark.parametrize(
    "message",
    [
        chatting(tools=[pb.Tool(name="f", parameters=JSON)]),
        chatting(
            tools=[pb.Tool(name="f", parameters=JSON)],
            tool_choice=pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED),
        ),
        chatting(pb.Message(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments=JSON)])),
    ],
)
def test_json_of_tools_and_calls_is_not_parsed_on_the_event_loop(
    message: pb.GenerateRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(json, "loads")
    check_request(message, MODEL, DRAFTING)


def test_as_much_as_is_allowed_passes() -> None:
    check_request(chatting(template_arguments=arguments(MAX_ARGUMENT_VALUES - 1)), MODEL, DRAFTING)
    check_request(chatting(parts(MAX_PARTS)), MODEL, DRAFTING)
    check_request(chatting(*[calls(128)] * (MAX_CALLS // 128)), MODEL, DRAFTING)


def test_a_templates_arguments_are_json_with_whole_numbers_as_integers() -> None:
    given = {"a": 1, "b": [1.5, None, True, {"c": ["x", {}]}], "d": -2.0}
    prompt: Any = check_request(chatting(template_arguments=given), MODEL, DRAFTING).prompt
    assert prompt.arguments == given
    assert [type(prompt.arguments[name]) for name in "ad"] == [int, int]
