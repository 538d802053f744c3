"""Score, Embed, Rerank and prompt_logprobs over real processes; the truth are the oracle's own hashes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from numpy.typing import NDArray
from paceline import Client, TextToScore, errors
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from examples import scoring
from executor_service.backends.numpy_sampler import log_softmax
from executor_service.backends.oracle_backend.oracle import OracleBackend
from scheduler_service.core.evaluation import HiddenPooling
from scheduler_service.rpc.codec.rerank import INSTRUCTION, JUDGE
from tests.support.stack import Stack, eventually, oracle_stack

MODEL = OracleBackend()
VOCABULARY = MODEL.info.vocab_size
QUERY = "Which of these rides in the wind shadow of another? " * 2


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    small = ["--prefill-chunk-tokens", "24", "--max-step-tokens", "64"]
    with oracle_stack(tmp_path_factory.mktemp("stack"), scheduler=small) as stack:
        yield stack
        assert "Traceback" not in stack.scheduler.log


@pytest.fixture
async def stub(stack: Stack) -> AsyncIterator[rpc.SchedulerServiceAsyncStub]:
    async with grpc.aio.insecure_channel(stack.scheduler.address) as channel:
        yield rpc.SchedulerServiceStub(channel)
    for address in stack.addresses:
        await stack.all_pages_back(address)


def logprobs_of(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Of the next token after each of these, [tokens, vocabulary]."""
    (whole,) = MODEL.forward_once([np.array(tokens, np.int32)], frozenset({"logits"}))
    assert whole.logits is not None
    return log_softmax(whole.logits)


def vector_of(tokens: Sequence[int], pooling: HiddenPooling) -> NDArray[np.float32]:
    (whole,) = MODEL.forward_once([np.array(tokens, np.int32)], frozenset({"hidden"}))
    assert whole.hidden is not None
    mean: NDArray[np.float32] = whole.hidden.mean(axis=0)
    return whole.hidden[-1] if pooling is HiddenPooling.LAST else mean


def scores_of(tokens: Sequence[int], first: int) -> list[float]:
    return logprobs_of(tokens)[np.arange(first - 1, len(tokens) - 1), tokens[first:]].tolist()


def ids(*tokens: int) -> pb.TokenIds:
    return pb.TokenIds(ids=tokens)


async def test_the_example_finds_what_the_model_finds_likeliest(stack: Stack) -> None:
    prompt, choices = "Two and two are", [" four", " five", " the Eiffel Tower"]

    def ask() -> tuple[int, list[float]]:
        with Client(stack.scheduler.address) as client:
            return scoring.likeliest(client, prompt, choices)

    best, means = await asyncio.to_thread(ask)
    behind = [[*prompt.encode(), *text.encode()] for text in choices]
    expected = [float(np.mean(scores_of(tokens, len(prompt)))) for tokens in behind]
    assert means == pytest.approx(expected, abs=1e-4)
    assert best == int(np.argmax(expected))


async def test_scores_are_the_models_own(stub: rpc.SchedulerServiceAsyncStub) -> None:
    long = [(7 * i) % VOCABULARY for i in range(200)]
    inputs = [
        pb.ScoreInput(text="to be or not to be"),
        pb.ScoreInput(prompt_text="to be or", text=" not to be"),
        pb.ScoreInput(token_ids=ids(*long)),
        pb.ScoreInput(prompt_token_ids=ids(*long[:150]), token_ids=ids(*long[150:])),
        pb.ScoreInput(
            prompt_messages=pb.Messages(messages=[pb.Message(role="user", content="hi")]), text="ho"
        ),
        pb.ScoreInput(token_ids=ids(5)),
    ]
    reply = await stub.Score(pb.ScoreRequest(request_id="s", inputs=inputs, top_logprobs=3))
    text = list(b"to be or not to be")
    chat = list(b"user: hi\nassistant: ho")
    wholes = [(text, 1), (text, 8), (long, 1), (long, 150), (chat, len(chat) - 2), ([5], 1)]
    for score, (tokens, first) in zip(reply.scores, wholes, strict=True):
        found = [one.logprob for one in score.logprobs]
        assert list(score.token_ids) == tokens[first:]
        assert found == pytest.approx(scores_of(tokens, first), abs=1e-5)
        assert score.logprob == pytest.approx(sum(found), abs=1e-9)
        assert score.perplexity == pytest.approx(math.exp(-sum(found) / len(found)) if found else 1)
        best = np.sort(logprobs_of(tokens)[first - 1 : -1])[:, ::-1][:, :3]
        for one, expected in zip(score.logprobs, best, strict=True):
            assert list(one.top_logprobs) == pytest.approx(expected.tolist(), abs=1e-5)
    usage = reply.usage
    assert (reply.request_id, usage.prompt_tokens) == ("s", sum(len(tokens) for tokens, _ in wholes))
    assert usage.cached_tokens >= 144 - 16  # the third input's first tokens, for the fourth
    assert 0 <= usage.queue_ms <= usage.total_ms


@pytest.mark.parametrize("kind", HiddenPooling)
async def test_vectors_are_the_models_own(stub: rpc.SchedulerServiceAsyncStub, kind: HiddenPooling) -> None:
    pooling = pb.POOLING_LAST if kind is HiddenPooling.LAST else pb.POOLING_MEAN
    tokens = [(3 * i) % VOCABULARY for i in range(90)]
    inputs = [pb.EmbedInput(text="abc"), pb.EmbedInput(token_ids=ids(*tokens)), pb.EmbedInput(text="x")]
    size = (await stub.GetModelInfo(pb.GetModelInfoRequest())).embedding_size
    plain = await stub.Embed(pb.EmbedRequest(inputs=inputs, pooling=pooling, normalize=False))
    cut = await stub.Embed(pb.EmbedRequest(inputs=inputs, pooling=pooling, dimensions=5))
    for whole, short, content in zip(
        plain.embeddings, cut.embeddings, (list(b"abc"), tokens, list(b"x")), strict=True
    ):
        vector = vector_of(content, kind)
        start = vector[:5] / np.linalg.norm(vector[:5])
        assert len(whole.values) == size
        assert (whole.tokens, len(short.values)) == (len(content), 5)
        assert list(whole.values) == pytest.approx(vector.tolist(), abs=1e-5)
        assert list(short.values) == pytest.approx(start.tolist(), abs=1e-5)


async def test_documents_are_ranked_by_the_probability_of_yes(stub: rpc.SchedulerServiceAsyncStub) -> None:
    documents = [f"Document {number}, which is about riders." for number in range(7)]
    reply = await stub.Rerank(pb.RerankRequest(query=QUERY, documents=documents, top_n=5))
    expected = []
    for index, document in enumerate(documents):
        user = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
        prompt = f"system: {JUDGE}\nuser: {user}\nassistant: ".encode()
        yes, no = logprobs_of(list(prompt))[-1][[ord("y"), ord("n")]]
        expected.append((-1 / (1 + math.exp(no - yes)), index))
    expected.sort()
    assert [one.index for one in reply.results] == [index for _, index in expected[:5]]
    assert [one.score for one in reply.results] == pytest.approx([-s for s, _ in expected[:5]], abs=1e-5)
    assert reply.usage.cached_tokens > 0.5 * reply.usage.prompt_tokens


async def test_documents_are_ranked_by_the_likelihood_of_the_query(
    stub: rpc.SchedulerServiceAsyncStub,
) -> None:
    documents = ["riders", "rain", "riders"]
    method = pb.RERANK_METHOD_LIKELIHOOD
    reply = await stub.Rerank(pb.RerankRequest(query="wind?", documents=documents, method=method))
    scores = [
        float(np.mean(scores_of(list(f"{text}\n\nwind?".encode()), len(text) + 2))) for text in documents
    ]
    best = sorted(range(3), key=lambda index: (-scores[index], index))
    assert [one.index for one in reply.results] == best
    assert [one.score for one in reply.results] == pytest.approx([scores[i] for i in best], abs=1e-5)


@pytest.mark.parametrize("method", [pb.RERANK_METHOD_YES_NO, pb.RERANK_METHOD_LIKELIHOOD])
async def test_two_empty_documents_of_50_change_no_other_score(
    stub: rpc.SchedulerServiceAsyncStub, method: pb.RerankMethod.ValueType
) -> None:
    documents = ["" if number in (7, 30) else f"Riders, document {number}." for number in range(50)]
    filled = [text for text in documents if text]
    mixed = await stub.Rerank(pb.RerankRequest(query="wind?", documents=documents, method=method))
    alone = await stub.Rerank(pb.RerankRequest(query="wind?", documents=filled, method=method))
    assert [(documents[one.index], one.score) for one in mixed.results[:48]] == [
        (filled[one.index], one.score) for one in alone.results
    ]
    assert [(one.index, one.empty, one.score) for one in mixed.results[48:]] == [(7, True, 0), (30, True, 0)]
    assert mixed.usage.prompt_tokens == alone.usage.prompt_tokens
    nothing = await stub.Rerank(pb.RerankRequest(query="wind?", documents=["", ""], method=method))
    assert [one.empty for one in nothing.results] == [True, True]


async def test_logprobs_of_the_prompt_come_before_the_first_delta(
    stub: rpc.SchedulerServiceAsyncStub,
) -> None:
    prompt = [(5 * i) % VOCABULARY for i in range(100)]
    request = pb.GenerateRequest(token_ids=ids(*prompt), prompt_logprobs=2)
    request.stop.max_tokens = 4
    kinds, found = [], list[float]()
    async for message in stub.Generate(request):
        kinds.append(message.WhichOneof("event"))
        if kinds[-1] == "prompt_logprobs":
            assert message.prompt_logprobs.first == 1 + len(found)
            found += [one.logprob for one in message.prompt_logprobs.logprobs]
            assert all(len(one.top_ids) == 2 for one in message.prompt_logprobs.logprobs)
        if kinds[-1] == "delta":
            assert not message.delta.logprobs
    assert found == pytest.approx(scores_of(prompt, 1), abs=1e-5)
    assert kinds[:2] == ["started", "prompt_logprobs"]
    first = kinds.index("delta")
    assert "prompt_logprobs" not in kinds[first:]
    with pytest.raises(grpc.aio.AioRpcError, match="no place") as refused:
        await stub.GenerateUnary(pb.GenerateUnaryRequest(request=request))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_sdk_gives_what_the_wire_has(stack: Stack, stub: rpc.SchedulerServiceAsyncStub) -> None:
    tokens = list(b"to be or not to be")
    async with stack.client() as client:
        scored = await client.score(["to be or not to be", TextToScore(" to be", prompt="to be or not")])
        for text, first in zip(scored.texts, (1, 12), strict=True):
            assert [one.logprob for one in text.logprobs] == pytest.approx(scores_of(tokens, first), abs=1e-5)
        found = await client.embed([tokens], pooling="mean", normalize=False)
        assert list(found.vectors[0]) == pytest.approx(
            vector_of(tokens, HiddenPooling.MEAN).tolist(), abs=1e-5
        )
        for method in ("yes_no", "likelihood"):
            ranked = await client.rerank(QUERY, ["riders", "rain"], method=method)
            assert sorted(one.index for one in ranked.results) == [0, 1]
            assert ranked.results[0].score >= ranked.results[1].score
        generation = client.generate(token_ids=tokens, prompt_logprobs=0, max_tokens=2)
        await generation.collect()
        prompt = [one.logprob for one in generation.prompt_logprobs]
        assert prompt == pytest.approx(scores_of(tokens, 1), abs=1e-5)
        with pytest.raises(errors.InvalidRequest, match=r"inputs\[1\].text: must not be empty"):
            await client.score(["a", ""])
        with pytest.raises(errors.InvalidRequest, match="dimensions"):
            await client.embed(["a"], dimensions=10**6)
        with pytest.raises(errors.Unsupported, match="no place"):
            await client.completions("x", prompt_logprobs=0)


async def test_a_client_that_leaves_ends_its_call(stub: rpc.SchedulerServiceAsyncStub) -> None:
    """The pages are free at once (the fixture waits for them), and the id too."""
    long = pb.EmbedInput(token_ids=ids(*(i % VOCABULARY for i in range(3000))))
    request = pb.EmbedRequest(request_id="left", inputs=[long] * 8, pooling=pb.POOLING_MEAN)
    call = stub.Embed(request)

    async def has_begun() -> bool:
        return (await stub.GetStatus(pb.GetStatusRequest())).running > 0

    async def is_over() -> bool:
        status = await stub.GetStatus(pb.GetStatusRequest())
        return status.running == status.waiting == 0

    await eventually(has_begun, "it has not begun")
    call.cancel()
    await eventually(is_over, "it goes on")


async def test_a_call_is_aborted_by_its_id(stub: rpc.SchedulerServiceAsyncStub) -> None:
    long = pb.EmbedInput(token_ids=ids(*(i % VOCABULARY for i in range(3000))))
    call = stub.Embed(pb.EmbedRequest(request_id="gone", inputs=[long] * 8, pooling=pb.POOLING_MEAN))

    async def aborted() -> bool:
        return bool((await stub.Abort(pb.AbortRequest(request_ids=["gone"]))).aborted)

    await eventually(aborted, "it was never live")
    assert await call.code() is grpc.StatusCode.ABORTED


@pytest.mark.slow
async def test_an_executor_killed_amid_a_call_changes_no_score(tmp_path: Path) -> None:
    tokens = [[(13 * i + n) % VOCABULARY for i in range(400)] for n in range(6)]
    request = pb.ScoreRequest(inputs=[pb.ScoreInput(token_ids=ids(*one)) for one in tokens])
    with oracle_stack(
        tmp_path, executor=["--step-ms", "15"], scheduler=["--max-step-tokens", "64"], executors=2
    ) as stack:
        async with grpc.aio.insecure_channel(stack.scheduler.address) as channel:
            stub = rpc.SchedulerServiceStub(channel)
            for number in range(6):
                call = asyncio.ensure_future(stub.Score(request))
                await asyncio.sleep(0.1 + 0.03 * number)
                victim = stack.addresses[number % 2]
                stack.executor(victim).kill()
                reply = await call
                for score, one in zip(reply.scores, tokens, strict=True):
                    found = [each.logprob for each in score.logprobs]
                    assert found == pytest.approx(scores_of(one, 1), abs=1e-5)
                stack.restart_executor(victim)
            status = await stub.GetStatus(pb.GetStatusRequest())
            assert status.finished == 6
