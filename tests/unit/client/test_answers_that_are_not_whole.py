"""A status of OK hides no loss: what can't be parsed, or is not all of the answer, is an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import paceline
import pytest
from google.protobuf.message import Message
from paceline import aio, errors
from paceline.executor.v1 import executor_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.unit.client.answering import Run, answering, both

JUNK = b"\xff" * 9
DELTA = pb.GenerateResponse(delta=pb.Delta(token_ids=[1], text="once"))
END = pb.Finished(reason=pb.FINISH_REASON_STOP)


STREAMS: dict[str, tuple[int, list[Message | bytes]]] = {
    "no message at all": (1, []),
    "no end": (1, [DELTA]),
    "an end of one of two": (2, [DELTA, pb.GenerateResponse(index=1, finished=END)]),
    "bytes that are no message": (1, [DELTA, JUNK]),
    "bytes that are no message, then an end": (1, [DELTA, JUNK, pb.GenerateResponse(finished=END)]),
    "an end without a reason": (1, [pb.GenerateResponse(finished=pb.Finished())]),
    "a completion that was not asked for": (1, [pb.GenerateResponse(index=1, finished=END)]),
    "more after the end": (2, [pb.GenerateResponse(finished=END), DELTA]),
    "half of a logprob": (
        1,
        [pb.GenerateResponse(delta=pb.Delta(logprobs=[pb.TokenLogprobs(top_ids=[1])])), *[DELTA] * 3],
    ),
}


@both
@pytest.mark.parametrize("case", STREAMS)
async def test_a_stream_that_is_not_whole_raises(run: Run, case: str) -> None:
    n, messages = STREAMS[case]
    async with answering("Generate", *messages) as address:
        with pytest.raises(errors.InternalError):
            await run(address, lambda client: client.generate("x", n=n).collect())


@both
async def test_the_error_says_which_completion_is_not_whole(run: Run) -> None:
    async with answering("Generate", pb.GenerateResponse(finished=END), DELTA) as address:
        with pytest.raises(errors.InternalError, match="completion 0, which has finished"):
            await run(address, lambda client: client.generate("x", n=2).collect())
    async with answering("Generate", pb.GenerateResponse(finished=END)) as address:
        with pytest.raises(errors.InternalError, match="before completion 1 finished") as caught:
            await run(address, lambda client: client.generate("x", n=2).collect())
        assert caught.value.code is grpc.StatusCode.DATA_LOSS


async def test_what_came_before_the_loss_is_delivered_and_nothing_after_it() -> None:
    async with answering("Generate", DELTA, JUNK, DELTA) as address, aio.Client(address) as client:
        generation = client.generate("x")
        assert (await anext(generation)).index == 0
        with pytest.raises(errors.InternalError, match="can't be parsed"):
            await anext(generation)
        assert [event async for event in generation] == []


def whole(*indexes: int) -> pb.GenerateUnaryResponse:
    return pb.GenerateUnaryResponse(completions=[pb.Completion(index=i, finished=END) for i in indexes])


REPLIES: dict[str, Message | bytes] = {
    "bytes that are no message": JUNK,
    "nothing": pb.GenerateUnaryResponse(),
    "one of two": whole(0),
    "three of two": whole(0, 1, 2),
    "one twice": whole(0, 0),
    "an unfinished one": pb.GenerateUnaryResponse(
        completions=[pb.Completion(index=0, finished=END), pb.Completion(index=1, text="half")]
    ),
}


@both
@pytest.mark.parametrize("case", REPLIES)
async def test_a_collected_answer_that_is_not_whole_raises(run: Run, case: str) -> None:
    async with answering("GenerateUnary", REPLIES[case]) as address:
        with pytest.raises(errors.InternalError):
            await run(address, lambda client: client.completions("x", n=2))


@both
async def test_other_replies_that_cannot_be_parsed_raise(run: Run) -> None:
    async with answering("GetStatus", JUNK) as address:
        for use in (
            lambda client: client.status(),
            lambda client: client.model_info(),
            lambda client: client.tokenize("x"),
            lambda client: client.detokenize([1]),
            lambda client: client.abort(["x"]),
        ):
            with pytest.raises(errors.InternalError):
                await run(address, use)


STEP = executor_pb2.Step()


@pytest.mark.parametrize("answer", [JUNK, b""])
async def test_a_step_answered_without_a_result_raises(answer: bytes) -> None:
    def each(client: Any) -> list[Callable[[], Any]]:
        steps = (client.prefill, client.decode, client.batch_decode, client.unified_decode)
        return [lambda step=step: step(STEP) for step in steps] + [
            lambda: client.forward([[1]], []),
            lambda: client.release_cache(executor_pb2.StepHeader(), [1]),
        ]

    def block(address: str) -> None:
        with paceline.ExecutorClient(address) as client:
            for call in each(client):
                with pytest.raises(errors.InternalError):
                    call()

    async with answering("Decode", answer) as address, aio.ExecutorClient(address) as client:
        for call in each(client):
            with pytest.raises(errors.InternalError):
                await call()
        await asyncio.to_thread(block, address)


@pytest.mark.parametrize("answer", [JUNK, b""])
async def test_a_step_on_a_stream_answered_without_a_result_raises(answer: bytes) -> None:
    def block(address: str) -> None:
        with paceline.ExecutorClient(address) as client, client.stream() as stream:
            stream.send(STEP)
            with pytest.raises(errors.InternalError):
                stream.recv()

    async with answering("StreamUnifiedDecode", answer) as address:
        async with aio.ExecutorClient(address) as client, client.stream() as stream:
            with pytest.raises(errors.InternalError):
                await stream.recv()
        await asyncio.to_thread(block, address)
