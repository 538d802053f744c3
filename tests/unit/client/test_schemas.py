"""A schema goes out as JSON, and the output comes back as the value that it describes, or as an error."""

from __future__ import annotations

import json
import typing
from dataclasses import replace
from enum import Enum
from typing import Any, Literal, assert_type

import pytest
from paceline import aio, errors
from paceline.chat import ToolCall
from paceline.client import Client
from paceline.grammars import set_grammar
from paceline.requests import Options
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.schemas import json_schema
from paceline.types import Completion, Finished, FinishReason, Usage
from pydantic import BaseModel, TypeAdapter, ValidationError

from tests.unit.client.answering import Run, answering, both


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Part(BaseModel):
    properties: dict[str, int] = {}  # a name that JSON schema uses too
    sizes: set[Size] = set()


class Thing(BaseModel):
    name: str
    kind: Literal["a", "b"]
    count: int | None = None
    part: Part
    parts: list[Part | str] = []
    more: list[Thing] = []


NO_USAGE = Usage(0, 0, 0, 0, 0, 0, 0, 0, 0)


def done(text: str, **of_finished: Any) -> Completion:
    end = replace(Finished(0, FinishReason.STOP, NO_USAGE, eos_token_id=2), **of_finished)
    return Completion(0, text, (1,), (), end, schema=Thing)


THING = '{"name": "x", "kind": "a", "part": {"properties": {"p": 1}, "sizes": ["small", "small"]}}'


def test_a_model_is_closed_wherever_it_has_properties_and_nothing_else_is_changed() -> None:
    sent = json.loads(json_schema(Thing))
    assert sent["$defs"]["Thing"].pop("additionalProperties") is False
    part = sent["$defs"]["Part"]
    assert part.pop("additionalProperties") is False
    assert part["properties"]["properties"]["additionalProperties"] == {"type": "integer"}
    part["properties"]["sizes"]["uniqueItems"] = True  # a set takes repeated items
    assert sent == Thing.model_json_schema()


def test_a_schema_of_ones_own_is_sent_as_it_is() -> None:
    own = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    assert json.loads(json_schema(own)) == own
    assert json_schema('{"type":  "null"}') == '{"type":  "null"}'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_json_lacks_is_refused_before_it_is_sent(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_schema({"const": value})
    with pytest.raises(errors.InvalidRequest, match=r"schema: .* not JSON compliant"):
        set_grammar(pb.GenerateRequest(), "schema", {"const": value})


def test_an_open_model_stays_open() -> None:
    class Open(BaseModel, extra="allow"):
        a: int

    assert json.loads(json_schema(Open))["additionalProperties"] is True


def test_the_text_of_a_model_is_an_instance() -> None:
    thing = done(THING).parsed
    assert thing == Thing(name="x", kind="a", part=Part(properties={"p": 1}, sizes={Size.SMALL}))


def test_the_text_of_other_schemas_is_their_value() -> None:
    assert replace(done("[1, 2]"), schema=TypeAdapter(list[int])).parsed == [1, 2]
    assert replace(done('{"a": 1}'), schema={"type": "object"}).parsed == {"a": 1}
    assert replace(done("3"), schema='{"type": "integer"}').parsed == 3


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ({"reason": FinishReason.LENGTH, "eos_token_id": None}, "reached max_tokens"),
        ({"stop_string": "!", "eos_token_id": None}, "the stop string '!' ended it"),
        ({"stop_token_id": 7, "eos_token_id": None}, "the stop token 7 ended it"),
    ],
)
def test_what_was_cut_off_is_never_taken_for_a_whole_value(cut: dict[str, Any], said: str) -> None:
    """A beginning can be valid: 12 of 123."""
    with pytest.raises(errors.InvalidOutput, match=said):
        replace(done("12", **cut), schema={"type": "integer"}).parsed  # noqa: B018
    with pytest.raises(errors.InvalidOutput, match="has not finished"):
        replace(done(THING), finished=None).parsed  # noqa: B018


def test_what_pydantic_refuses_is_an_error_that_says_where_and_why() -> None:
    with pytest.raises(errors.InvalidOutput, match=r"completion 0: (?s:.*)kind") as caught:
        done(THING.replace('"a"', '"c"')).parsed  # noqa: B018
    assert isinstance(caught.value.__cause__, ValidationError)


def test_a_value_that_is_nested_too_deeply_or_too_long_is_an_error() -> None:
    for text in ("[" * 100_000, "9" * 5000):
        with pytest.raises(errors.InvalidOutput):
            replace(done(text), schema={}).parsed  # noqa: B018


def test_without_a_schema_there_is_nothing_to_parse() -> None:
    with pytest.raises(errors.InvalidRequest, match="no schema"):
        replace(done("{}"), schema=None).parsed  # noqa: B018


def test_arguments_of_a_call_are_a_mapping_or_an_error() -> None:
    assert ToolCall("1", "f", '{"a": [1]}').parsed == {"a": [1]}
    for cut in ('{"a": ', "[1]", "", "[" * 100_000):
        with pytest.raises(errors.InvalidOutput, match="arguments of 'f'"):
            ToolCall("1", "f", cut).parsed  # noqa: B018


END = pb.Finished(reason=pb.FINISH_REASON_STOP, eos_token_id=2)
CUT = pb.Finished(reason=pb.FINISH_REASON_LENGTH)


@both
async def test_each_completion_is_an_instance_or_an_error_however_it_was_asked_for(run: Run) -> None:
    stream = [
        pb.GenerateResponse(delta=pb.Delta(text=THING[:9])),
        pb.GenerateResponse(index=1, delta=pb.Delta(text=THING)),
        pb.GenerateResponse(index=1, finished=CUT),
        pb.GenerateResponse(delta=pb.Delta(text=THING[9:])),
        pb.GenerateResponse(finished=END),
    ]
    reply = pb.GenerateUnaryResponse(
        completions=[
            pb.Completion(text=THING, finished=END),
            pb.Completion(index=1, text=THING, finished=CUT),
        ]
    )
    async with answering("Generate", *stream) as address:
        collected = await run(address, lambda client: client.generate("x", n=2, schema=Thing).collect())
    async with answering("GenerateUnary", reply) as address:
        completed = await run(address, lambda client: client.completions("x", n=2, schema=Thing))
    for first, second in (collected, completed):
        assert isinstance(first.parsed, Thing)
        with pytest.raises(errors.InvalidOutput, match="completion 1 is not a whole value"):
            second.parsed  # noqa: B018


@pytest.mark.parametrize("client", [Client, aio.Client])
def test_checkers_know_the_type_of_what_is_parsed(client: type[Client | aio.Client]) -> None:
    """mypy judges the functions, which are not called."""

    def blocking(client: Client) -> None:
        assert_type(client.chat("x", schema=Thing).parsed, Thing)
        assert_type(client.complete("x", schema=TypeAdapter(list[int])).parsed, list[int])
        assert_type([one.parsed for one in client.completions("x", schema=Thing)], list[Thing])
        assert_type([one.parsed for one in client.generate("x", schema=Thing).collect()], list[Thing])
        assert_type(client.chat("x", schema={"type": "integer"}).parsed, Any)
        assert_type(client.chat("x"), Completion[Any])
        client.chat("x", temprature=0)  # type: ignore[call-arg]
        client.chat("x", temperature="0")  # type: ignore[arg-type]

    async def asynchronous(client: aio.Client) -> None:
        assert_type((await client.chat("x", schema=Thing)).parsed, Thing)
        assert_type((await client.complete("x", schema=TypeAdapter(list[int]))).parsed, list[int])
        assert_type([one.parsed for one in await client.completions("x", schema=Thing)], list[Thing])
        assert_type([one.parsed for one in await client.generate("x", schema=Thing).collect()], list[Thing])
        assert_type((await client.chat("x", schema='{"type": "integer"}')).parsed, Any)
        await client.chat("x", temprature=0)  # type: ignore[call-arg]

    options = typing.get_type_hints(client.chat)["options"]
    assert typing.get_origin(typing.get_args(options)[0]) is Options


@both
async def test_what_is_collected_begins_with_what_was_read_before(run: Run) -> None:
    """Else the rest of a number would be taken for the number."""
    texts = [pb.GenerateResponse(delta=pb.Delta(text=text)) for text in "123"]

    def use(client: Any) -> Any:
        generation = client.generate("x", schema={"type": "integer"})
        next(generation)
        return generation.collect()

    async def use_async(client: Any) -> Any:
        generation = client.generate("x", schema={"type": "integer"})
        await anext(generation)
        first = await generation.collect()
        assert await generation.collect() == first
        return first

    async with answering("Generate", *texts, pb.GenerateResponse(finished=END)) as address:
        [completion] = await run(address, use_async if run.__name__ == "asynchronous" else use)
    assert completion.parsed == 123
