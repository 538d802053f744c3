"""score, embed and rerank of both clients: requests, results, failover; and adapters of administrators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from math import nan
from typing import Any

import grpc
import paceline
import pytest
from google.rpc import code_pb2
from paceline import AdapterInfo, TextToScore, errors, evaluation_requests
from paceline.chat import Message
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.types import TokenLogprobs

from tests.unit.client.answering import Run, answering, both
from tests.unit.client.conftest import Served, serving_fake
from tests.unit.client.fake_scheduler import rich_status

OPTIONS: dict[str, Any] = {
    "model": "a",
    "priority": -2,
    "labels": {"user": "ada"},
    "cache_salt": "salt",
    "request_id": "mine",
}
HELLO = [Message("user", "hello")]


@asynccontextmanager
async def two_schedulers() -> AsyncIterator[tuple[Served, Served]]:
    async with AsyncExitStack() as stack:
        yield (
            await stack.enter_async_context(serving_fake()),
            await stack.enter_async_context(serving_fake()),
        )


async def broken(context: Any) -> None:
    """What gRPC makes of a connection that breaks."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def full(context: Any) -> None:
    await context.abort_with_status(
        rich_status(code_pb2.RESOURCE_EXHAUSTED, "the queue is full", "QUEUE_FULL", 1.5)
    )


@both
async def test_texts_are_scored_one_by_one(run: Run, served: Served) -> None:
    inputs = [
        "whole",
        [1, 2, 3],
        TextToScore("é", prompt="before"),
        TextToScore(token_ids=[7], messages=HELLO),
    ]
    reply = await run(served.address, lambda client: client.score(inputs, top_logprobs=2, **OPTIONS))
    assert [one.token_ids for one in reply.texts] == [tuple(b"hole"), (2, 3), tuple("é".encode()), (7,)]
    first = reply.texts[0]
    assert first.logprobs == (TokenLogprobs(-0.5, ((65, -0.5), (66, -1.5))),) * 4
    assert (first.logprob, first.perplexity) == (-2.0, 1.5)
    assert (reply.request_id, reply.usage.prompt_tokens, reply.usage.cached_tokens) == ("mine", 9, 3)
    assert (reply.usage.queue_ms, reply.usage.total_ms) == (1, 2)
    [sent] = served.fake.evaluations
    assert isinstance(sent, pb.ScoreRequest)
    assert {name: getattr(sent, name) for name in OPTIONS} == OPTIONS
    assert [one.WhichOneof("prompt") for one in sent.inputs] == [None, None, "prompt_text", "prompt_messages"]
    assert sent.top_logprobs == 2


@both
async def test_vectors_come_in_the_order_of_their_inputs(run: Run, served: Served) -> None:
    def use(client: Any) -> Any:
        return client.embed(["ab", [5]], pooling="mean", normalize=False, dimensions=2, **OPTIONS)

    reply = await run(served.address, use)
    assert (reply.vectors, reply.tokens) == (((2.0, 0.5), (1.0, 0.5)), (2, 1))
    [sent] = served.fake.evaluations
    assert isinstance(sent, pb.EmbedRequest)
    assert (sent.pooling, sent.HasField("normalize"), sent.normalize) == (pb.POOLING_MEAN, True, False)
    assert {name: getattr(sent, name) for name in OPTIONS} == OPTIONS
    await run(served.address, lambda client: client.embed(["x"]))
    last = served.fake.evaluations[-1]
    assert isinstance(last, pb.EmbedRequest)
    assert not last.HasField("normalize")  # the service's default


@both
async def test_documents_come_back_best_first(run: Run, served: Served) -> None:
    def use(client: Any) -> Any:
        return client.rerank(
            "q", ["a", "ccc", "bb"], method="likelihood", instruction="i", top_n=2, **OPTIONS
        )

    reply = await run(served.address, use)
    assert [(one.index, one.score) for one in reply.results] == [(1, 0.8), (2, 0.75)]
    [sent] = served.fake.evaluations
    assert isinstance(sent, pb.RerankRequest)
    assert (sent.query, list(sent.documents)) == ("q", ["a", "ccc", "bb"])
    assert (sent.method, sent.instruction) == (pb.RERANK_METHOD_LIKELIHOOD, "i")
    assert {name: getattr(sent, name) for name in OPTIONS} == OPTIONS


CALLS: dict[str, Callable[[Any], Any]] = {
    "score": lambda client: client.score(["x"]),
    "embed": lambda client: client.embed(["x"]),
    "rerank": lambda client: client.rerank("q", ["x"]),
}


@both
@pytest.mark.parametrize("call", CALLS)
async def test_a_lost_call_is_sent_again_with_its_id(run: Run, call: str) -> None:
    async with two_schedulers() as (one, two):
        for each in (one, two):
            each.fake.endings = [broken]
        await run(f"{one.address},{two.address}", CALLS[call])
        sent = [*one.fake.evaluations, *two.fake.evaluations]
    assert len(sent) == 3
    assert sent[0].request_id
    assert all(other == sent[0] for other in sent)


@both
async def test_a_call_that_one_scheduler_refuses_is_taken_by_another(run: Run) -> None:
    async with two_schedulers() as (one, two):
        both_addresses = f"{one.address},{two.address}"
        for each in (one, two):
            each.fake.endings = [full]
        with pytest.raises(errors.QueueFull, match="the queue is full") as refused:
            await run(both_addresses, CALLS["embed"])
        assert refused.value.retry_after_s == 1.5
        one.fake.endings = [full]
        assert (await run(both_addresses, CALLS["embed"])).tokens == (1,)


@both
async def test_adapters_are_loaded_on_all_schedulers(run: Run) -> None:
    async with two_schedulers() as (one, two):
        addresses = f"{one.address},{two.address}"
        loaded = await run(addresses, lambda client: client.load_adapter("a", "path"))
        assert loaded == AdapterInfo("a", b"path", 4, 1000, 7)
        assert [list(each.admin.loaded) for each in (one, two)] == [["a"], ["a"]]
        assert await run(addresses, lambda client: client.adapters()) == (loaded,)
        del one.admin.loaded["a"]
        assert await run(addresses, lambda client: client.unload_adapter("a"))
        assert not await run(addresses, lambda client: client.unload_adapter("a"))
        info = await run(addresses, lambda client: client.model_info())
        assert (info.adapters, info.embedding_size) == ((AdapterInfo("a", b"f", 4),), 4)
        assert info.limits.max_inputs == 3
        with pytest.raises(errors.Unavailable):  # loudly, though one of them has it
            await run(f"{one.address},127.0.0.1:1", lambda client: client.load_adapter("a"))


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: score("text"), TypeError, "inputs must be a sequence of texts to score, got str"),
    (lambda: score([TextToScore()]), errors.InvalidRequest, r"inputs\[0\]: give exactly one of text and"),
    (lambda: score([TextToScore("a", token_ids=[1])]), errors.InvalidRequest, "exactly one of text and"),
    (
        lambda: score(["a", TextToScore("a", prompt="", messages=HELLO)]),
        errors.InvalidRequest,
        r"inputs\[1\]",
    ),
    (lambda: score([TextToScore("a", messages=[{"role": "u"}])]), errors.InvalidRequest, "0].messages"),
    (lambda: score([b"bytes"]), TypeError, r"inputs\[0\] must be a sequence of integers, got bytes"),
    (lambda: score([[1, -1]]), errors.InvalidRequest, r"inputs\[0\]: "),
    (lambda: score(["\ud800"]), errors.InvalidRequest, r"inputs\[0\]: "),
    (lambda: score(["a"], top_logprobs=-1), errors.InvalidRequest, "top_logprobs"),
    (lambda: score(["a"], temperature=1), TypeError, "unknown option 'temperature'"),
    (lambda: embed("text"), TypeError, "inputs must be a sequence of texts or token ids, got str"),
    (lambda: embed(["a"], pooling="max"), errors.InvalidRequest, "pooling: expected one of last, mean, cls"),
    (lambda: embed(["a"], dimensions=-1), errors.InvalidRequest, "dimensions"),
    (
        lambda: embed(["a"], prompt="", prompt_name="b"),
        errors.InvalidRequest,
        "prompt_name: give at most one",
    ),
    (lambda: embed(["a"], prompt=1), TypeError, "prompt must be"),
    (lambda: rerank("q", "text"), TypeError, "documents must be a sequence of strings, got str"),
    (lambda: rerank("q", ["a"], method="yes"), errors.InvalidRequest, "method: expected one of yes_no"),
    (lambda: rerank(3, ["a"]), TypeError, "query must be a string"),
]


def score(inputs: Any, top_logprobs: int | None = None, **options: Any) -> pb.ScoreRequest:
    return evaluation_requests.score_request(inputs, top_logprobs, options)


def embed(inputs: Any, **given: Any) -> pb.EmbedRequest:
    chosen = {"pooling": None, "normalize": None, "dimensions": None} | given
    return evaluation_requests.embed_request(inputs, {}, **chosen)


def rerank(query: Any, documents: Any, method: str | None = None) -> pb.RerankRequest:
    return evaluation_requests.rerank_request(query, documents, method, None, None, {})


@pytest.mark.parametrize(("make", "kind", "said"), WRONG)
def test_what_the_wire_cannot_carry_is_refused_by_name(
    make: Callable[[], Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        make()


def test_what_is_empty_reaches_the_service_which_refuses_it() -> None:
    sent = score(["", [], TextToScore("", prompt_token_ids=[])]).inputs
    kinds = [(one.WhichOneof("prompt"), one.WhichOneof("scored")) for one in sent]
    assert kinds == [(None, "text"), (None, "token_ids"), ("prompt_token_ids", "text")]
    assert embed([]).request_id != embed([]).request_id


HALF: list[tuple[str, Any, Callable[[Any], Any]]] = [
    ("Score", pb.ScoreResponse(), CALLS["score"]),
    ("Score", pb.ScoreResponse(scores=[pb.Score(token_ids=[1])]), CALLS["score"]),
    ("Embed", pb.EmbedResponse(), CALLS["embed"]),
    ("Embed", pb.EmbedResponse(embeddings=[pb.Embedding()]), CALLS["embed"]),
    (
        "Embed",
        pb.EmbedResponse(embeddings=[pb.Embedding(values=[1.0])]),
        lambda client: client.embed(["x"], dimensions=2),
    ),
    ("Rerank", pb.RerankResponse(), CALLS["rerank"]),
    ("Rerank", pb.RerankResponse(results=[pb.RankedDocument(index=1)]), CALLS["rerank"]),
    ("Rerank", b"\xff" * 9, CALLS["rerank"]),
    (
        "Rerank",
        pb.RerankResponse(results=[pb.RankedDocument(), pb.RankedDocument()]),
        lambda client: client.rerank("q", ["x", "y"]),
    ),
]
NO_NUMBERS: list[tuple[str, Any, Callable[[Any], Any]]] = [
    ("Score", pb.ScoreResponse(scores=[pb.Score(logprob=nan)]), CALLS["score"]),
    ("Score", pb.ScoreResponse(scores=[pb.Score(perplexity=nan)]), CALLS["score"]),
    ("Embed", pb.EmbedResponse(embeddings=[pb.Embedding(values=[1.0, nan, 2.0])]), CALLS["embed"]),
    ("Rerank", pb.RerankResponse(results=[pb.RankedDocument(score=nan)]), CALLS["rerank"]),
]


@both
@pytest.mark.parametrize(("method", "answer", "call"), NO_NUMBERS)
async def test_a_reply_with_what_is_not_a_number_raises(
    run: Run, method: str, answer: Any, call: Callable[[Any], Any]
) -> None:
    async with answering(method, answer) as address:
        with pytest.raises(errors.InternalError, match="is not a number"):
            await run(address, call)


@both
@pytest.mark.parametrize(("method", "answer", "call"), HALF)
async def test_a_reply_that_is_not_whole_raises(
    run: Run, method: str, answer: Any, call: Callable[[Any], Any]
) -> None:
    async with answering(method, answer) as address:
        with pytest.raises(errors.InternalError):
            await run(address, call)


@both
async def test_logprobs_of_the_prompt_are_there_with_the_first_event(run: Run) -> None:
    started = pb.GenerateResponse(started=pb.Started(prompt_tokens=3, adapter_fingerprint=b"f"))
    one = pb.TokenLogprobs(logprob=-0.5, top_ids=[4], top_logprobs=[-0.5])
    part = pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(first=1, logprobs=[one, one]))
    end = pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_STOP))
    generations: list[Any] = []

    def use(client: Any) -> Any:
        generations.append(client.generate("x", prompt_logprobs=1, model="a"))
        return generations[0].collect()

    delta = pb.GenerateResponse(delta=pb.Delta(token_ids=[1]))
    async with answering("Generate", started, part, delta, end) as address:
        await run(address, use)
    assert generations[0].prompt_logprobs == (TokenLogprobs(-0.5, ((4, -0.5),)),) * 2
    assert generations[0].started.adapter_fingerprint == b"f"


def test_the_names_of_the_sdk_are_all_there() -> None:
    assert all(hasattr(paceline, name) for name in paceline.__all__)
