"""Tools and reasoning end to end: demanded calls, reasoning before them, and streams that are resumed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import grpc
import pytest
from paceline.chat import Message
from paceline.collector import Collector
from paceline.requests import generate_request
from paceline.resume import ResumableStream, identified
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc
from paceline.types import Completion, Delta
from pydantic import BaseModel, Field

from executor_service.backends.byte_tokenizer import byte_tokenizer
from tests.support.doctored_executor import doctored_stack
from tests.support.stack import Stack
from tests.unit.scheduler_shell.tool_styles import GLM, QWEN

MARKERS = {0xF5: "<think>", 0xF6: "</think>", 0xF7: "<tool_call>", 0xF8: "</tool_call>"}
"""In the place of bytes that no text has."""
THINK_END, CALL = 0xF6, 0xF7
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    pb.Tool(name="weather", parameters=json.dumps(PARAMETERS)),
    pb.Tool(name="now", parameters='{"properties": {}, "additionalProperties": false}'),
]


def tokenizer() -> str:
    """The oracle's, with markers."""
    files = json.loads(byte_tokenizer().tokenizer_json)
    vocabulary = {id_: piece for piece, id_ in files["model"]["vocab"].items()} | MARKERS
    files["model"]["vocab"] = {piece: id_ for id_, piece in vocabulary.items()}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    files["added_tokens"] += [{"id": id_, "content": text, **plain} for id_, text in MARKERS.items()]
    return json.dumps(files)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    with doctored_stack(directory, chat_template=QWEN, tokenizer_json=tokenizer()) as stack:
        yield stack
        assert "Traceback" not in stack.scheduler.log


@pytest.fixture
async def stub(stack: Stack) -> AsyncIterator[rpc.SchedulerServiceAsyncStub]:
    async with grpc.aio.insecure_channel(stack.scheduler.address) as channel:
        yield rpc.SchedulerServiceStub(channel)


def request(name: str = "", *, thinks: bool = True, **fields: Any) -> pb.GenerateRequest:
    choice = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED, name=name)
    messages = pb.Messages(
        messages=[pb.Message(role="user", content="hello")], tools=TOOLS, tool_choice=choice
    )
    messages.template_arguments["enable_thinking"] = thinks
    sampling = pb.SamplingParams(temperature=1.0, seed=3, logit_bias={THINK_END: 2.0})
    given = {"messages": messages, "sampling": sampling, "stop": pb.StopConditions(max_tokens=400)}
    return pb.GenerateRequest(**(given | fields))


class Joined:
    """The output of one completion, joined from its deltas."""

    def __init__(self) -> None:
        self.one = pb.Completion()
        self.started = pb.Started()

    def add(self, message: pb.GenerateResponse) -> None:
        if message.HasField("started"):
            self.started = message.started
        if message.HasField("finished"):
            self.one.finished.CopyFrom(message.finished)
        self.one.token_ids.extend(message.delta.token_ids)
        self.one.text += message.delta.text
        self.one.reasoning += message.delta.reasoning
        for call in message.delta.tool_calls:
            if call.id:
                assert call.index == len(self.one.tool_calls)
                self.one.tool_calls.add(id=call.id, name=call.name)
            self.one.tool_calls[call.index].arguments += call.arguments


async def generate(stub: rpc.SchedulerServiceAsyncStub, message: pb.GenerateRequest) -> Joined:
    joined = Joined()
    async for response in stub.Generate(message):
        joined.add(response)
    return joined


async def test_the_model_says_what_it_can(stub: rpc.SchedulerServiceAsyncStub) -> None:
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.tool_format, info.limits.max_tools) == ("hermes", 128)
    has = {pb.CAPABILITY_TOOLS, pb.CAPABILITY_STRICT_TOOLS, pb.CAPABILITY_REASONING}
    assert has <= set(info.capabilities)


async def test_demanded_calls_come_behind_the_reasoning_and_match_their_schemas(
    stub: rpc.SchedulerServiceAsyncStub,
) -> None:
    got = (await generate(stub, request("weather"))).one
    assert got.reasoning
    assert got.text == ""
    (call,) = got.tool_calls
    arguments = json.loads(call.arguments)
    assert call.arguments == json.dumps(arguments, ensure_ascii=False)
    assert call.name == "weather"
    assert arguments.keys() == {"city", "days"}
    assert len(arguments["city"]) <= 6
    assert arguments["days"] in (1, 2)
    assert got.finished.eos_token_id == 256
    ids = list(got.token_ids)
    assert got.finished.usage.reasoning_tokens == ids.index(THINK_END) + 1
    without = (await generate(stub, request("weather", thinks=False))).one
    assert (without.reasoning, without.finished.usage.reasoning_tokens) == ("", 0)
    assert len(without.tool_calls) == 1


def free(*, thinks: bool = False, **choice: Any) -> pb.GenerateRequest:
    """A request whose model may write text, and wants to make calls."""
    message = request(request_id="free", thinks=thinks)
    message.messages.tool_choice.CopyFrom(pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_AUTO, **choice))
    message.messages.tools[0].strict = True
    message.sampling.logit_bias.update({CALL: 6.0, THINK_END: 6.0})
    message.stop.max_tokens = 200
    return message


@pytest.mark.parametrize("thinks", [True, False])
async def test_calls_of_a_free_model_are_those_that_the_request_allows(
    stub: rpc.SchedulerServiceAsyncStub, thinks: bool
) -> None:
    message = free(thinks=thinks, max_calls=2, names=["weather"])
    got = (await generate(stub, message)).one
    assert bool(got.reasoning) == thinks
    assert len(got.tool_calls) == 2
    assert got.text
    for call in got.tool_calls:
        assert call.name == "weather"
        arguments = json.loads(call.arguments)
        assert arguments.keys() == {"city", "days"}
        assert len(arguments["city"]) <= 6
        assert arguments["days"] in (1, 2)


async def test_drafts_of_what_a_call_forces_change_no_token(stub: rpc.SchedulerServiceAsyncStub) -> None:
    without = free(max_calls=1)
    without.speculation.mode = pb.SPECULATION_MODE_OFF
    plain = (await generate(stub, without)).one
    accepted = 0
    for _ in range(20):  # whether drafts pay, and are made, depends on what steps took
        drafted = (await generate(stub, free(max_calls=1))).one
        assert drafted.tool_calls
        assert drafted.token_ids == plain.token_ids
        accepted += drafted.finished.usage.grammar_accepted_tokens
        if accepted:
            break
    assert accepted > 0


async def test_several_completions_and_unary_answers_have_the_same_calls(
    stub: rpc.SchedulerServiceAsyncStub,
) -> None:
    message = request(request_id="same", n=2)
    joined = [Joined(), Joined()]
    async for response in stub.Generate(message):
        joined[response.index].add(response)
    answer = await stub.GenerateUnary(pb.GenerateUnaryRequest(request=message))
    for index, completion in enumerate(answer.completions):
        assert completion.tool_calls
        for name in ("token_ids", "text", "reasoning", "tool_calls"):
            assert getattr(completion, name) == getattr(joined[index].one, name)
    assert len({call.id for completion in answer.completions for call in completion.tool_calls}) >= 2


@pytest.mark.parametrize("message", [request("weather", request_id="resumed"), free(max_calls=1)])
async def test_a_stream_is_resumed_behind_any_token_with_exactly_the_rest(
    stub: rpc.SchedulerServiceAsyncStub, message: pb.GenerateRequest
) -> None:
    whole = await generate(stub, message)
    received = Joined()
    cuts: list[tuple[pb.ContinuedCompletion, Joined]] = []
    async for response in stub.Generate(message):
        received.add(response)
        cut = Joined()
        cut.one.CopyFrom(received.one)
        one = pb.ContinuedCompletion(
            token_ids=cut.one.token_ids,
            text_bytes=len(cut.one.text.encode()),
            reasoning_bytes=len(cut.one.reasoning.encode()),
            argument_bytes=[len(call.arguments.encode()) for call in cut.one.tool_calls],
        )
        cuts.append((one, cut))
    for one, cut in cuts[1 : -1 : max(1, len(cuts) // 8)]:
        resumed = pb.GenerateRequest()
        resumed.CopyFrom(message)
        resumed.sampling.CopyFrom(whole.started.sampling)
        resumed.continuation.completions.append(one)
        resumed.continuation.prompt_digest = whole.started.prompt_digest
        resumed.continuation.model_fingerprint = whole.started.model_fingerprint
        resumed.continuation.sampler = whole.started.sampler
        async for response in stub.Generate(resumed):
            cut.add(response)
        for name in ("token_ids", "text", "reasoning", "tool_calls"):
            assert getattr(cut.one, name) == getattr(whole.one, name), name
        assert cut.one.finished.usage.reasoning_tokens == whole.one.finished.usage.reasoning_tokens


async def test_a_grammar_of_the_requests_own_begins_behind_the_reasoning_too(
    stub: rpc.SchedulerServiceAsyncStub,
) -> None:
    message = request(grammar=pb.Grammar(regex="[ab]{3}"))
    del message.messages.tools[:]
    message.messages.ClearField("tool_choice")
    got = (await generate(stub, message)).one
    assert got.reasoning
    assert len(got.text) == 3
    assert set(got.text) <= set("ab")


async def test_a_tool_that_can_not_be_demanded_is_refused_before_the_queue(
    stub: rpc.SchedulerServiceAsyncStub,
) -> None:
    message = request()
    message.messages.tools[0].parameters = '{"not": {}}'
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith("messages.tools: ")


HELLO = [Message("user", "hello")]
SAMPLED: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 3,
    "logit_bias": {THINK_END: 2.0},
    "max_tokens": 400,
    "request_id": "same",  # the ids of calls follow from it
}


class City(BaseModel):
    name: Annotated[str, Field(max_length=6)]


def weather(city: Annotated[str, Field(max_length=6)], unit: Literal["C", "F"]) -> str:
    """Today's weather in a city."""
    return f"20 {unit} in {city}"


async def test_a_function_is_called_through_the_sdk_and_its_result_goes_back(stack: Stack) -> None:
    async with stack.client() as client:
        generation = client.generate(messages=HELLO, tools=[weather], tool_choice="weather", **SAMPLED)
        deltas = [event async for event in generation if isinstance(event, Delta)]
        [streamed] = await generation.collect()
        answer = await client.chat(HELLO, tools=[weather], tool_choice="weather", **SAMPLED)
        assert without_usage(answer) == without_usage(streamed)
        assert answer.reasoning
        [call] = answer.tool_calls
        assert sum(bool(delta.tool_calls) for delta in deltas) > 1
        turns = [*HELLO, answer.message(), call.answer(weather(**call.parsed))]
        await client.chat(turns, tools=[weather], tool_choice="none", max_tokens=5)


async def test_an_instance_of_a_model_is_what_comes_behind_the_reasoning(stack: Stack) -> None:
    async with stack.client() as client:
        for thinks in (True, False):
            arguments = {"enable_thinking": thinks}
            answer = await client.chat(HELLO, schema=City, template_arguments=arguments, **SAMPLED)
            assert isinstance(answer.parsed, City)
            assert bool(answer.reasoning) == thinks


@pytest.mark.parametrize("quarters", [1, 2, 3])
async def test_the_sdk_continues_reasoning_and_calls(
    stack: Stack, stub: rpc.SchedulerServiceAsyncStub, quarters: int
) -> None:
    """Of the first attempt it has seen so much, and at least the first delta, when the connection is lost."""
    options = {"tools": [weather], "tool_choice": "weather", **SAMPLED}
    async with stack.client() as client:
        whole = await client.chat(HELLO, **options)
    stream = ResumableStream(identified(generate_request(None, HELLO, None, options)))
    collector = Collector()
    for attempt in range(2):
        messages = [message async for message in stub.Generate(stream.attempt(float(attempt)))]
        for message in messages if attempt else messages[: max(2, len(messages) * quarters // 4)]:
            if (event := stream.see(message)) is not None:
                collector.add(event)
    stream.check_end()
    [got] = collector.completions()
    assert stream.resumptions == 1
    assert without_usage(got) == without_usage(whole)


def without_usage(completion: Completion) -> tuple[object, ...]:
    assert completion.finished is not None
    usage, one = completion.finished.usage, completion
    counts = usage.completion_tokens, usage.reasoning_tokens
    return one.text, one.reasoning, one.tool_calls, one.token_ids, counts


async def test_arguments_without_quotation_marks_are_what_their_schemas_say(tmp_path: Path) -> None:
    digits = {"type": "string", "enum": ["7", "null"]}
    parameters = {
        "type": "object",
        "properties": {"zone": digits, "days": {"enum": [1, 2]}},
        "required": ["zone"],
    }
    with doctored_stack(tmp_path, chat_template=GLM, tokenizer_json=tokenizer()) as stack:
        async with grpc.aio.insecure_channel(stack.scheduler.address) as channel:
            stub = rpc.SchedulerServiceStub(channel)
            message = request("shift", thinks=False)
            message.messages.tools[0].CopyFrom(pb.Tool(name="shift", parameters=json.dumps(parameters)))
            (call,) = (await generate(stub, message)).one.tool_calls
            message.messages.tools[0].parameters = "[]"
            with pytest.raises(grpc.aio.AioRpcError, match=r"messages\.tools\[0\]\.parameters"):
                await generate(stub, message)
    assert json.loads(call.arguments)["zone"] in ("7", "null")
    assert json.loads(call.arguments).get("days") in (None, 1, 2)
