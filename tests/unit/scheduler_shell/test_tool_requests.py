"""Tools, calls and demanded calls of a request: checked field by field, and named where they are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.chat.formats import FORMATS
from scheduler_service.chat.tools import CallRules
from scheduler_service.core.request import OutputGrammar
from scheduler_service.errors import ErrorReason
from scheduler_service.rpc.codec.requests import check_request
from scheduler_service.rpc.codec.tools import grammar_of_calls
from scheduler_service.streams.request import ChatPrompt, CheckedRequest
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.models_made_here import DRAFTING
from tests.unit.scheduler_shell.models_made_here import MODEL as PLAIN

HERMES = replace(PLAIN, tool_format=FORMATS["hermes"]({}), max_grammar_bytes=2000)
REQUIRED, NO_CALLS = pb.TOOL_CHOICE_MODE_REQUIRED, pb.TOOL_CHOICE_MODE_NONE
F, G = pb.Tool(name="f", parameters='{"type": "object"}'), pb.Tool(name="g-1", description="x")
STRICT = pb.Tool(name="h", strict=True)


def asks(
    *tools: pb.Tool, choice: pb.ToolChoice | None = None, turns: list[pb.Message] | None = None, **fields: Any
) -> pb.GenerateRequest:
    turns = turns or [pb.Message(role="user", content="x")]
    return pb.GenerateRequest(messages=pb.Messages(messages=turns, tools=tools, tool_choice=choice), **fields)


def called(**fields: Any) -> pb.GenerateRequest:
    return asks(turns=[pb.Message(role="assistant", tool_calls=[pb.ToolCall(**fields)])])


def check(message: pb.GenerateRequest, model: Any = HERMES) -> CheckedRequest:
    return check_request(message, model, DRAFTING)


BAD: list[tuple[str, pb.GenerateRequest]] = [
    ("messages.tools", asks(*[pb.Tool(name=f"f{i}") for i in range(129)])),
    ("messages.tools", asks(pb.Tool(name="f", description="x" * 1000))),
    ("messages[0].content", asks(pb.Tool(name="f", description="x" * 999))),
    *(("messages.tools[0].name", asks(pb.Tool(name=name))) for name in ("", "a b", "é", "x" * 65, "a\n")),
    ("messages.tools[1].name", asks(F, F)),
    ("messages.tool_choice.mode", asks(F, choice=pb.ToolChoice(mode=9))),  # type: ignore[arg-type]
    ("messages.tool_choice.mode", asks(choice=pb.ToolChoice(mode=REQUIRED))),
    ("messages.tool_choice.name", asks(F, choice=pb.ToolChoice(name="f"))),
    ("messages.tool_choice.name", asks(F, choice=pb.ToolChoice(mode=REQUIRED, name="h"))),
    *(
        (f"messages.tool_choice.{field}", asks(F, G, choice=choice))
        for field, choice in (
            ("max_calls", pb.ToolChoice(max_calls=129)),
            ("max_calls", pb.ToolChoice(mode=NO_CALLS, max_calls=1)),
            ("names", pb.ToolChoice(mode=NO_CALLS, names=["f"])),
            ("names", pb.ToolChoice(mode=REQUIRED, name="f", names=["f"])),
            ("names[1]", pb.ToolChoice(names=["f", "h"])),
            ("names[1]", pb.ToolChoice(names=["f", "f"])),
        )
    ),
    ("messages.tool_choice.names[0]", asks(choice=pb.ToolChoice(names=["f"]))),
    ("stop.ignore_eos", asks(STRICT, stop=pb.StopConditions(ignore_eos=True))),
    ("grammar", asks(STRICT, grammar=pb.Grammar(regex="a"))),
    ("grammar", asks(F, grammar=pb.Grammar(regex="a"))),
    ("grammar", asks(F, choice=pb.ToolChoice(mode=REQUIRED), grammar=pb.Grammar(regex="a"))),
    (
        "stop.ignore_eos",
        asks(F, choice=pb.ToolChoice(mode=REQUIRED), stop=pb.StopConditions(ignore_eos=True)),
    ),
    ("messages[0].tool_calls[0].name", called(name="a b")),
    ("messages[0].tool_calls[0].id", called(name="f", id="x" * 129)),
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


def test_tools_and_calls_keep_their_json_as_it_was_sent() -> None:
    turns = [
        pb.Message(role="assistant", tool_calls=[pb.ToolCall(id="1", name="f", arguments='{"b": 1.0')]),
        pb.Message(role="tool", content="2", tool_call_id="1", name="f"),
    ]
    chat = prompt(asks(F, G, turns=turns))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1.0'}}
    assert chat.messages == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "f", "tool_call_id": "1"},
    )
    assert chat.tools == (("f", "", '{"type": "object"}'), ("g-1", "x", ""))


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


def test_demanded_calls_are_calls_of_the_tools_that_may_be_called() -> None:
    free = prompt(asks(F, G, choice=pb.ToolChoice(mode=REQUIRED)))
    named = prompt(asks(F, G, choice=pb.ToolChoice(mode=REQUIRED, name="g-1")))
    assert free.calls == CallRules((0, 1), demanded=True)
    assert named.calls == CallRules((1,), demanded=True, max_calls=1)
    assert named.tools[0].name == "f"
    assert prompt(asks(F, G)).calls is None


@pytest.mark.parametrize(
    ("tools", "choice", "rules"),
    [
        ([F, STRICT, G], None, CallRules((0, 1, 2), demanded=False, strict=frozenset({1}))),
        ([F, STRICT], pb.ToolChoice(names=["f"]), CallRules((0,), demanded=False)),
        ([F, G], pb.ToolChoice(max_calls=2), CallRules((0, 1), demanded=False, max_calls=2)),
        (
            [F, G, STRICT],
            pb.ToolChoice(mode=REQUIRED, names=["h", "f"], max_calls=3),
            CallRules((0, 2), demanded=True, max_calls=3, strict=frozenset({2})),
        ),
        ([F, G], pb.ToolChoice(mode=REQUIRED, name="f", max_calls=9), CallRules((0,), True, max_calls=1)),
        ([F, STRICT], pb.ToolChoice(mode=NO_CALLS), None),
        ([], pb.ToolChoice(max_calls=1), None),
    ],
)
def test_a_request_says_which_calls_may_be_made_and_how_many(
    tools: list[pb.Tool], choice: pb.ToolChoice | None, rules: CallRules | None
) -> None:
    chat = prompt(asks(*tools, choice=choice))
    assert chat.calls == rules
    assert len(chat.tools) in (0, len(tools))  # names hide no tool from the model: the prompt stays the same


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("messages.tools[1].strict", asks(F, STRICT)),
        ("messages.tool_choice.max_calls", asks(F, choice=pb.ToolChoice(max_calls=1))),
        ("messages.tool_choice.names", asks(F, choice=pb.ToolChoice(mode=REQUIRED, names=["f"]))),
    ],
)
def test_without_a_grammar_of_text_and_calls_their_restrictions_are_refused_by_name(
    field: str, message: pb.GenerateRequest
) -> None:
    pythonic = replace(HERMES, tool_format=FORMATS["llama3-pythonic"]({}))
    for model, why in ((pythonic, "llama3-pythonic"), (replace(HERMES, max_grammar_bytes=0), "no grammars")):
        assert not model.restricts_calls
        with raises(ErrorReason.UNSUPPORTED, match=why) as caught:
            check(message, model)
        assert caught.value.field == field
    assert HERMES.restricts_calls


def test_a_grammar_of_calls_is_within_the_executors_limit() -> None:
    assert grammar_of_calls("x" * 2000, HERMES) == OutputGrammar("lark", "x" * 2000)
    with raises(ErrorReason.INVALID_REQUEST, match="2001 bytes as a grammar") as caught:
        grammar_of_calls("x" * 2001, HERMES)
    assert caught.value.field == "messages.tools"


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
