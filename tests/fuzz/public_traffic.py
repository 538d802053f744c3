"""Hostile requests of all RPCs: nonsense, and valid ones with a few fields disturbed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import grpc
import grpc.aio
from google.protobuf.message import Message
from paceline.scheduler.v1 import admin_pb2, admin_pb2_grpc
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.fuzz import adapter_traffic
from tests.fuzz.messages import disturb

EVALUATIONS = ("Score", "Embed", "Rerank")
RPCS = ("Generate",) * 6 + ("GenerateUnary",) * 2 + EVALUATIONS + ("Tokenize", "Detokenize", "Abort")


def _valid(rng: random.Random, vocab_size: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]), seed=rng.randrange(1000)),
        stop=pb.StopConditions(max_tokens=rng.randrange(1, 8)),
    )
    kind = rng.randrange(3)
    if kind == 0:
        request.text = "The capital of France is"
    elif kind == 1:
        request.messages.messages.add(role="user", content="Hello")
    else:
        request.token_ids.ids.extend(rng.randrange(vocab_size) for _ in range(rng.randrange(1, 40)))
    return request


def _ids(rng: random.Random, vocab_size: int, most: int = 40) -> pb.TokenIds:
    return pb.TokenIds(ids=[rng.randrange(vocab_size) for _ in range(rng.randrange(1, most))])


def _evaluation(
    name: str, rng: random.Random, vocab_size: int
) -> pb.ScoreRequest | pb.EmbedRequest | pb.RerankRequest:
    """Inputs of very different lengths, among them one that is too long, and an empty one now and then."""
    count = rng.choice([1, 2, 3, 8, 40])
    texts = [
        rng.choice(["a", "The capital of France", "x" * 300, "é🚴", "y" * 30_000, ""]) for _ in range(count)
    ]
    if rng.random() < 0.7:
        texts = [text or "b" for text in texts]
    if name == "Rerank":
        documents = texts if rng.random() < 0.9 else ["d"] * rng.choice([1024, 1025, 10_000])
        return pb.RerankRequest(
            query="Which?", documents=documents, method=rng.choice(pb.RerankMethod.values())
        )
    if name == "Embed":
        inputs = [
            pb.EmbedInput(text=text) if rng.random() < 0.7 else pb.EmbedInput(token_ids=_ids(rng, vocab_size))
            for text in texts
        ]
        return pb.EmbedRequest(
            inputs=inputs, pooling=rng.choice(pb.Pooling.values()), dimensions=rng.choice([0, 0, 1, 16])
        )
    request = pb.ScoreRequest()
    for text in texts:
        one = request.inputs.add(text=text)
        match rng.randrange(4):
            case 0:
                one.prompt_text = "Once upon"
            case 1:
                one.prompt_messages.messages.add(role="user", content="Hello")
            case 2:
                one.prompt_token_ids.CopyFrom(_ids(rng, vocab_size, 300))
        if rng.random() < 0.3:
            one.token_ids.CopyFrom(_ids(rng, vocab_size))
    if rng.random() < 0.5:
        request.top_logprobs = rng.choice([0, 1, 5, 20])
    return request


def request(
    rng: random.Random, vocab_size: int, rpcs: Sequence[str] = RPCS, models: Sequence[str] = ("",)
) -> tuple[str, Message]:
    """One hostile request and the RPC, of these, to send it to. Most `model` fields name one of `models`."""
    name = rng.choice(rpcs)
    if name in adapter_traffic.RPCS:
        return adapter_traffic.request(rng, admin_pb2)
    rate = rng.choice([0.0, 0.03, 0.1, 0.3, 0.65])
    if name in ("Generate", "GenerateUnary"):
        inner = _valid(rng, vocab_size)
        disturb(rng, inner, rate)
        if rng.random() < 0.8:  # else most are refused for these, before anything deep inside is tried
            for field in ("grammar", "labels", "ttft_ms", "tpot_ms"):
                inner.ClearField(field)
            inner.model = rng.choice(models)
            if inner.HasField("messages"):
                inner.messages.ClearField("tools")
                inner.messages.ClearField("tool_choice")
        return name, inner if name == "Generate" else pb.GenerateUnaryRequest(request=inner)
    if name in EVALUATIONS:
        evaluation = _evaluation(name, rng, vocab_size)
        disturb(rng, evaluation, rate / 3)
        if rng.random() < 0.8:
            evaluation.ClearField("labels")
            evaluation.ClearField("priority")
            evaluation.model = rng.choice(models)
        return name, evaluation
    message: Message = getattr(pb, f"{name}Request")()
    disturb(rng, message, max(rate, 0.5))
    return name, message


async def run(
    channel: grpc.aio.Channel,
    vocab_size: int,
    count: int,
    seed: int,
    width: int = 8,
    rpcs: Sequence[str] = RPCS,
    models: Sequence[str] = ("",),
) -> Counter[str]:
    """Send `count` requests, `width` at a time; some leave in mid-stream. Counts status codes."""
    rng, codes, slots = random.Random(seed), Counter[str](), asyncio.Semaphore(width)
    public, admin = rpc.SchedulerServiceStub(channel), admin_pb2_grpc.AdminServiceStub(channel)

    async def one(name: str, message: Message, leave_after: int | None) -> None:
        async with slots:
            try:
                # A disturbed request may legitimately ask for a very long answer: cut it short.
                call = getattr(admin if name in adapter_traffic.RPCS else public, name)(message, timeout=2)
                if name == "Generate":
                    seen = 0
                    async for _ in call:
                        seen += 1
                        if seen == leave_after:
                            call.cancel()
                else:
                    await call
                codes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                codes[error.code().name] += 1
            except asyncio.CancelledError:
                codes["left"] += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            name, message = request(rng, vocab_size, rpcs, models)
            tasks.create_task(one(name, message, rng.choice([None, None, 1, 3])))
    return codes
