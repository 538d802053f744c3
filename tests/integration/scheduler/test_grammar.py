"""Generate with a grammar, end to end on the oracle: what comes out, and what does not matter to it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import grpc.aio
import pytest
from paceline import aio, errors, types
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc
from pydantic import BaseModel, Field

from tests.grammars.corpus import CorpusGrammar, all_larks, all_regexes, made_schemas
from tests.grammars.judges import complaint
from tests.support.stack import HEAL_S, Stack, eventually, oracle_stack

PROMPT = "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
        "kind": {"enum": ["one", "two"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with oracle_stack(tmp_path_factory.mktemp("stack"), executor=["--step-ms", "1"]) as stack:
        yield stack
        assert "Traceback" not in stack.scheduler.log


@pytest.fixture
async def client(stack: Stack) -> aio.Client:
    return stack.client()


@pytest.fixture(autouse=True)
async def nothing_leaks(stack: Stack) -> object:
    yield
    for address in stack.addresses:
        await stack.all_pages_back(address)


def reason_of(completion: types.Completion) -> types.FinishReason | None:
    return None if completion.finished is None else completion.finished.reason


async def texts(client: aio.Client, seeds: range, **options: Any) -> list[types.Completion]:
    runs = [client.completions(PROMPT, seed=seed, temperature=1.0, **options) for seed in seeds]
    return [completions[0] for completions in await asyncio.gather(*runs)]


async def test_what_ends_by_itself_matches(client: aio.Client) -> None:
    for completion in await texts(client, range(8), schema=SCHEMA, max_tokens=400):
        assert reason_of(completion) is types.FinishReason.STOP
        value = json.loads(completion.text)
        assert set(value) == {"name", "ages", "kind"}
        assert completion.text == json.dumps(value, ensure_ascii=False)
    for completion in await texts(client, range(4), regex="[a-c]{3}(-[0-9]+)?", max_tokens=100):
        assert re.fullmatch("[a-c]{3}(-[0-9]+)?", completion.text)
    for completion in await texts(client, range(4), choices=["yes", "no", "[a-z]"]):
        assert completion.text in ("yes", "no", "[a-z]")
    for completion in await texts(client, range(4), grammar='start: "<" start ">" | /[xy]/', max_tokens=30):
        if reason_of(completion) is types.FinishReason.STOP:
            assert re.fullmatch("<*[xy]>*", completion.text)


class Kind(Enum):
    ONE = "one"
    TWO = "two"


class Leaf(BaseModel):
    kind: Literal["leaf"]
    size: Annotated[int, Field(ge=0, le=9)]
    tags: set[Kind] = set()


class Node(BaseModel):
    kind: Literal["node"]
    name: Annotated[str, Field(pattern="^[a-z]{1,3}$")]
    below: Annotated[list[Node | Leaf], Field(max_length=2)] = []


class Model(BaseModel):
    """Models as they are usual."""

    day: date
    kind: Kind
    leaf: Leaf | None
    tree: Annotated[Node | Leaf, Field(discriminator="kind")]
    sizes: Annotated[dict[str, bool], Field(max_length=1)] = {}
    pair: tuple[bool, Kind] = (True, Kind.ONE)
    share: Annotated[float, Field(ge=0, le=1)] = 0.5


async def test_usual_pydantic_models_are_taken_and_come_back_as_instances(client: aio.Client) -> None:
    ended = 0
    for completion in await texts(client, range(12), schema=Model, max_tokens=600):
        if reason_of(completion) is types.FinishReason.STOP:
            assert isinstance(completion.parsed, Model)
            ended += 1
        else:
            with pytest.raises(errors.InvalidOutput, match="max_tokens"):
                completion.parsed  # noqa: B018
    assert ended > 3


async def test_what_has_no_effect_is_named_before_the_first_token(client: aio.Client, stack: Stack) -> None:
    schema = {
        "type": "array",
        "items": {"type": "string", "format": "decimal", "maxLength": 3},
        "maxItems": 2,
    }
    tag = {"triggers": ["<"], "structures": [{"begin": "<", "schema": schema, "end": ">"}]}
    told = ['format "decimal" is not known here: it demands nothing']
    both: list[dict[str, Any]] = [{"schema": schema}, {"structural_tag": tag}]
    for options in both:
        generation = client.generate(PROMPT, max_tokens=5, **options)
        await generation.collect()
        assert generation.started is not None
        assert list(generation.started.warnings) == told
    async with grpc.aio.insecure_channel(stack.scheduler.address) as channel:
        asked = pb.GenerateRequest(text=PROMPT, stop=pb.StopConditions(max_tokens=5))
        asked.grammar.json_schema = json.dumps(schema)
        generate = rpc.SchedulerServiceStub(channel).GenerateUnary
        assert list((await generate(pb.GenerateUnaryRequest(request=asked))).warnings) == told
        asked.grammar.json_schema = '{"type": "string", "format": "uuid4"}'
        assert not (await generate(pb.GenerateUnaryRequest(request=asked))).warnings


OPTIONS = {"json_schema": "schema", "regex": "regex", "lark": "grammar"}


@pytest.mark.parametrize("some", [made_schemas(24)[::3], all_regexes()[::13], all_larks()[::6]])
async def test_judges_that_know_nothing_of_the_engine_agree(
    client: aio.Client, some: list[CorpusGrammar]
) -> None:
    runs = [
        client.completions(
            PROMPT,
            seed=seed,
            temperature=1.0,
            max_tokens=150,
            **{OPTIONS[one.source.kind]: one.source.text},  # type: ignore[arg-type]
        )
        for seed, one in enumerate(some)
    ]
    answers = await asyncio.gather(*runs, return_exceptions=True)
    ended = 0
    for one, answer in zip(some, answers, strict=True):
        if isinstance(answer, errors.InvalidRequest):
            assert "Unimplemented keys" in answer.message
            continue
        assert isinstance(answer, list)
        if reason_of(answer[0]) is types.FinishReason.STOP:
            ended += 1
            assert complaint(one.source, answer[0].text) == "", answer[0].text
    assert ended >= 4


async def test_what_is_cut_off_is_a_beginning(client: aio.Client) -> None:
    for completion in await texts(client, range(4), schema=SCHEMA, max_tokens=12):
        assert reason_of(completion) is types.FinishReason.LENGTH
        assert completion.text.startswith('{"name": "')


async def test_drafts_completions_and_the_way_of_asking_change_nothing(client: aio.Client) -> None:
    plain = await texts(client, range(6), schema=SCHEMA, max_tokens=200, speculation="off")
    for speculation in (4, "auto", types.Speculation("auto", types.Drafter.GRAMMAR)):
        drafted = await texts(client, range(6), schema=SCHEMA, max_tokens=200, speculation=speculation)
        assert [one.text for one in drafted] == [one.text for one in plain]
        for one in drafted:  # what the schema forces is drafted, whatever else is
            assert one.finished is not None
            assert one.finished.usage.grammar_accepted_tokens > 10
    several = await client.completions(
        PROMPT, seed=0, temperature=1.0, schema=json.dumps(SCHEMA), n=4, max_tokens=200
    )
    assert several[0].text == plain[0].text
    assert len({one.text for one in several}) > 1
    for one in several:
        json.loads(one.text)


@pytest.mark.parametrize(
    ("options", "field", "told"),
    [
        ({"regex": "(a|"}, "grammar.regex", "unclosed group"),
        ({"schema": {"$ref": "https://example.com/x"}}, "grammar.json_schema", "example.com"),
        ({"grammar": "start: ]"}, "grammar.lark", ""),
        ({"choices": []}, "grammar.choices", "at least one"),
        ({"regex": ""}, "grammar.regex", "must not be empty"),
        ({"regex": "a" * 200_000}, "grammar", "bytes"),
        ({"regex": "a", "ignore_eos": True}, "stop.ignore_eos", "not with a grammar"),
    ],
)
async def test_a_bad_grammar_is_refused_before_it_is_queued(
    client: aio.Client, options: dict[str, Any], field: str, told: str
) -> None:
    before = await client.status()
    with pytest.raises(errors.InvalidRequest) as caught:
        await client.completions(PROMPT, **options)
    assert told in caught.value.message
    assert caught.value.metadata["field"] == field
    assert (await client.status()).failed == before.failed


async def test_a_grammar_that_gets_stuck_ends_its_request_alone(client: aio.Client) -> None:
    """One that allows nothing behind its first choices, which nobody can know before."""
    free = await texts(client, range(2), max_tokens=40, ignore_eos=True)
    stuck = client.completions(PROMPT, grammar='start: /[a-z]{3}/ <|eos|> "x"', max_tokens=40)
    together = await asyncio.gather(
        texts(client, range(2), max_tokens=40, ignore_eos=True), stuck, return_exceptions=True
    )
    assert isinstance(together[1], errors.InvalidRequest)
    assert "the grammar allows no token here" in together[1].message
    assert isinstance(together[0], list)
    assert [one.text for one in together[0]] == [one.text for one in free]


async def test_two_grammars_at_once_are_no_request(client: aio.Client) -> None:
    with pytest.raises(errors.InvalidRequest, match="only one of"):
        await client.completions(PROMPT, regex="a", choices=["a"])


async def test_neighbours_are_sampled_as_without_it(client: aio.Client) -> None:
    free = await texts(client, range(3), max_tokens=40, ignore_eos=True)
    together = await asyncio.gather(
        texts(client, range(3), max_tokens=40, ignore_eos=True), texts(client, range(3), schema=SCHEMA)
    )
    assert [one.text for one in together[0]] == [one.text for one in free]


async def test_a_stream_goes_on_in_the_middle_of_an_object_after_its_executor_was_killed(
    tmp_path: Path,
) -> None:
    with oracle_stack(tmp_path, executor=["--step-ms", "4"]) as stack:
        async with stack.client() as client:
            expected = [one.text for one in await texts(client, range(6), schema=SCHEMA, max_tokens=60)]
            (address,) = stack.addresses
            began = asyncio.Event()

            async def read(seed: int) -> str:
                text = ""
                generation = client.generate(PROMPT, seed=seed, temperature=1.0, schema=SCHEMA, max_tokens=60)
                async for event in generation:
                    if isinstance(event, types.Delta):
                        text += event.text
                        if len(text) > 12:
                            began.set()
                return text

            tasks = [asyncio.create_task(read(seed)) for seed in range(6)]
            await began.wait()
            stack.executor(address).kill()
            await asyncio.to_thread(stack.restart_executor, address)
            async with asyncio.timeout(10 * HEAL_S):
                assert await asyncio.gather(*tasks) == expected


async def test_preemption_changes_nothing(tmp_path: Path) -> None:
    """A pool barely larger than one request; sequences come back with their output."""
    small = ["--step-ms", "1", "--pages", "14", "--page-size", "8"]
    with oracle_stack(tmp_path, executor=small) as stack:
        async with stack.client() as client:
            alone = [
                (await texts(client, range(seed, seed + 1), schema=SCHEMA, max_tokens=70))[0].text
                for seed in range(5)
            ]
            together = await texts(client, range(5), schema=SCHEMA, max_tokens=70)
            assert [one.text for one in together] == alone

            async def preempted() -> bool:
                return (await client.status()).preemptions > 0

            await eventually(preempted, "nothing was preempted")
