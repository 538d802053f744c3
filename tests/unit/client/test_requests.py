import math
from typing import Any

import pytest
from paceline import conversations, requests
from paceline.chat import Message
from paceline.errors import InvalidRequest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import Drafter, Speculation

EVERYTHING: dict[str, Any] = {
    "labels": {"team": "x"},
    "return_prompt_token_ids": True,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {3: -1.0},
    "seed": 2**64 - 1,
    "logprobs": 0,
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "include_stop_string": True,
    "n": 3,
    "priority": -2,
    "cache_salt": "salt",
    "request_id": "id",
    "model": "a model",
    "prompt_logprobs": 0,
}


ON_REQUEST = {
    "n",
    "priority",
    "cache_salt",
    "request_id",
    "model",
    "prompt_logprobs",
    "labels",
    "return_prompt_token_ids",
}
CHAT_ONLY = {"template_arguments", "continue_final_message", "omit_opening", "tools", "tool_choice"}


def generate(prompt: str | None = "hi", **options: Any) -> pb.GenerateRequest:
    return requests.generate_request(prompt, None, None, options)


def test_every_option_has_its_place_on_the_wire() -> None:
    request = generate(**EVERYTHING)
    flat = {field.name: value for field, value in request.sampling.ListFields()}
    flat |= {field.name: value for field, value in request.stop.ListFields()}
    flat |= {field.name: value for field, value in request.ListFields()}
    flat |= {"stop": flat["strings"], "stop_token_ids": flat["token_ids"]}
    assert {name: flat[name] for name in EVERYTHING} == EVERYTHING


def test_what_is_returned_has_its_place_and_anything_else_is_refused() -> None:
    assert generate(returns="token_ids").returns == pb.RETURNS_TOKEN_IDS
    with pytest.raises(InvalidRequest, match="returns"):
        generate(returns="everything")


def test_options_of_a_chat_go_with_its_messages() -> None:
    hello = [Message("user", "hello")]
    request = requests.generate_request(
        None, hello, None, {"template_arguments": {"enable_thinking": False}, "continue_final_message": True}
    )
    assert dict(request.messages.template_arguments) == {"enable_thinking": False}
    assert request.messages.continue_final_message
    for name in CHAT_ONLY:
        with pytest.raises(InvalidRequest, match=f"{name}: only with messages"):
            requests.generate_request("hi", None, None, {name: ()})
    with pytest.raises(InvalidRequest, match="template_arguments"):
        requests.generate_request(None, hello, None, {"template_arguments": {"x": object()}})
    with pytest.raises(InvalidRequest, match="template_arguments"):
        requests.generate_request(None, hello, None, {"template_arguments": {"x": 10**400}})


def test_the_options_are_all_that_the_wire_has() -> None:
    others = {"speculation", "returns", "schema", "regex", "choices", "grammar", "structural_tag"}
    others.add("affinity_key")  # for the client alone
    assert set(EVERYTHING) | CHAT_ONLY | others == set(requests.Options.__annotations__)
    on_wire = {
        field.name for kind in (pb.SamplingParams, pb.StopConditions) for field in kind.DESCRIPTOR.fields
    }
    assert len(on_wire) == len(set(EVERYTHING) - ON_REQUEST)


@pytest.mark.parametrize(
    ("given", "wire"),
    [
        ("off", pb.Speculation(mode=pb.SPECULATION_MODE_OFF)),
        ("auto", pb.Speculation(mode=pb.SPECULATION_MODE_AUTO)),
        (5, pb.Speculation(mode=pb.SPECULATION_MODE_FIXED, draft_tokens=5)),
        (0, pb.Speculation(mode=pb.SPECULATION_MODE_FIXED)),  # for the service to refuse
        (Speculation(), pb.Speculation()),
        (Speculation(drafter=Drafter.NGRAM), pb.Speculation(drafter=pb.DRAFTER_NGRAM)),
        (
            Speculation(3, Drafter.DRAFT_EXECUTOR),
            pb.Speculation(mode=pb.SPECULATION_MODE_FIXED, draft_tokens=3, drafter=pb.DRAFTER_DRAFT_EXECUTOR),
        ),
    ],
)
def test_speculation_is_a_mode_or_a_mode_and_a_drafter(given: Any, wire: pb.Speculation) -> None:
    assert generate(speculation=given).speculation == wire


@pytest.mark.parametrize("bad", ["on", -1, 2**32, True, 1.5, Speculation(drafter="ngram")])  # type: ignore[arg-type]
def test_a_speculation_that_is_none_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(InvalidRequest, match="speculation"):
        generate(speculation=bad)


def test_what_is_not_given_stays_unset() -> None:
    request = generate()
    assert not request.HasField("sampling")
    assert not request.HasField("stop")


def test_zero_is_not_unset() -> None:
    assert generate(temperature=0.0).sampling.HasField("temperature")
    assert generate(seed=0).sampling.HasField("seed")
    assert generate(logprobs=0).sampling.HasField("logprobs")


@pytest.mark.parametrize(
    ("prompt", "messages", "token_ids"),
    [(None, None, None), ("a", [], None), ("a", None, [1]), (None, [], [1])],
)
def test_exactly_one_kind_of_prompt(prompt: Any, messages: Any, token_ids: Any) -> None:
    with pytest.raises(InvalidRequest, match="exactly one"):
        requests.generate_request(prompt, messages, token_ids, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("n", 2**40),
        ("seed", 2**64),
        ("seed", -1),
        ("priority", 2**31),
        ("stop_token_ids", [-1]),
        ("logit_bias", {-1: 0.5}),
        ("stop", ["\ud800"]),
        ("request_id", "\ud800"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: "):
        generate(**{name: value})


def test_infinities_are_left_to_the_service() -> None:
    assert math.isinf(generate(temperature=math.inf).sampling.temperature)
    assert math.isnan(generate(top_p=math.nan).sampling.top_p)


@pytest.mark.parametrize("token_ids", [[2**32], [-1], [2**70]])
def test_token_ids_outside_uint32_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=r"^token_ids: "):
        requests.generate_request(None, None, token_ids, {})


def test_an_empty_list_of_ids_reaches_the_service_as_such() -> None:
    assert requests.generate_request(None, None, [], {}).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(("name", "value"), [("stop", [1]), ("temperature", "hot"), ("nonsense", 1)])
def test_a_wrong_type_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        generate(**{name: value})


def test_messages_may_be_mappings_or_messages() -> None:
    wire = conversations.chat_messages([Message("system", "be brief"), {"role": "user", "content": "hi"}])
    assert [(one.role, one.content) for one in wire.messages] == [("system", "be brief"), ("user", "hi")]


def test_a_message_without_content_is_refused_by_its_index() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\] has no 'content'"):
        conversations.chat_messages([Message("user", "hi"), {"role": "user"}])


class Person:
    """As a pydantic model, whose class can tell its schema."""

    @classmethod
    def model_json_schema(cls) -> dict[str, object]:
        return {"type": "object"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schema": {"type": "integer"}}, pb.Grammar(json_schema='{"type": "integer"}')),
        ({"schema": '{"type": "null"}'}, pb.Grammar(json_schema='{"type": "null"}')),
        ({"schema": Person}, pb.Grammar(json_schema='{"type": "object"}')),
        ({"regex": "a+"}, pb.Grammar(regex="a+")),
        ({"choices": ["a", "b"]}, pb.Grammar(choices=pb.Choices(choices=["a", "b"]))),
        ({"choices": []}, pb.Grammar(choices=pb.Choices())),
        ({"grammar": "start: X"}, pb.Grammar(lark="start: X")),
        ({"structural_tag": {"triggers": []}}, pb.Grammar(structural_tag='{"triggers": []}')),
    ],
)
def test_a_grammar_is_one_of_several_options(options: dict[str, Any], expected: pb.Grammar) -> None:
    assert requests.generate_request("x", None, None, options).grammar == expected


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"regex": "a", "choices": ["a"]}, InvalidRequest),
        ({"schema": 3}, TypeError),
        ({"choices": "ab"}, TypeError),
        ({"regex": 3}, TypeError),
        ({"regex": "\ud800"}, InvalidRequest),
    ],
)
def test_a_grammar_of_a_wrong_type_is_named(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(reversed(options))):
        requests.generate_request("x", None, None, options)


HELLO = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("regex", 5, "regex must be a string, got int"),
        ("grammar", None, "grammar must be a string, got NoneType"),
        ("choices", "abc", "choices must be a sequence of strings, got str"),
        ("choices", [1, "a"], "choices must be a sequence of strings, got list of int, str"),
        ("schema", 5, "schema: expected a mapping, JSON or a pydantic model, got int"),
        ("structural_tag", 5, "structural_tag must be a mapping or JSON, got int"),
        ("stop", 5, "stop must be a sequence of strings, got int"),
        ("stop_token_ids", b"ab", "stop_token_ids must be a sequence of integers, got bytes"),
        ("max_tokens", "5", "max_tokens must be an integer, got str"),
        ("max_tokens", 5.0, "max_tokens must be an integer, got float"),
        ("n", True, "n must be an integer, got bool"),
        ("ignore_eos", "yes", "ignore_eos must be a bool, got str"),
        ("temperature", "1", "temperature must be a number, got str"),
        ("logit_bias", 5, "logit_bias must be a mapping of integers to numbers, got int"),
        ("logit_bias", {"a": 1}, "logit_bias must be a mapping of integers to numbers, got dict"),
        ("labels", {"a": 1}, "labels must be a mapping of strings to strings, got dict"),
        ("cache_salt", b"x", "cache_salt must be a string, got bytes"),
        ("tools", {}, "tools must be a sequence of tools, got dict"),
        ("template_arguments", [1], "template_arguments must be a mapping, got list of int"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_with_what_is_wanted(name: str, value: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        requests.generate_request(None, HELLO, None, {name: value})
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hi", "messages must be a sequence of messages, got str"),
        (HELLO[0], "messages must be a sequence of messages, got dict"),
        (5, "messages must be a sequence of messages, got int"),
        (["hi"], "messages[0] must be a Message or a mapping, got str"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string, got int"),
        (
            [{"role": "assistant", "tool_calls": {"a": 1}}],
            "messages[0].tool_calls must be a sequence of calls, got dict",
        ),
    ],
)
def test_messages_of_the_wrong_type_are_refused_with_what_is_wanted(messages: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        requests.tokenize_request(None, messages)
    assert str(caught.value) == said


@pytest.mark.parametrize(("name", "value"), [("returns", []), ("speculation", []), ("speculation", {})])
def test_an_option_that_is_none_of_its_words_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}"):
        requests.generate_request("x", None, None, {name: value})


def test_no_completion_at_all_can_be_asked_for() -> None:
    with pytest.raises(InvalidRequest, match=r"^n: must be at least 1"):
        requests.generate_request("x", None, None, {"n": 0})


def test_a_stop_string_may_stand_alone() -> None:
    assert generate(stop="end") == generate(stop=["end"])


def test_a_misspelt_option_is_told_what_it_may_mean() -> None:
    with pytest.raises(TypeError, match="unknown option 'stream'; `generate` yields an answer while"):
        generate(stream=True)
    with pytest.raises(TypeError, match="unknown option 'temprature'; did you mean 'temperature'"):
        generate(temprature=1.0)
