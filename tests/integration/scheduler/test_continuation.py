"""A stream that was interrupted goes on with the same tokens, text and counts."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.support.stack import Stack, oracle_stack

Messages = list[pb.GenerateResponse]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with oracle_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture
async def stub(stack: Stack) -> rpc.SchedulerServiceStub:
    channel = grpc.aio.insecure_channel(stack.scheduler.address)
    return rpc.SchedulerServiceStub(channel)


def request(**fields: object) -> pb.GenerateRequest:
    made = pb.GenerateRequest(text="Once upon a time", n=2)
    made.sampling.temperature = 1.0
    made.sampling.logprobs = 1
    made.stop.max_tokens = 24
    made.stop.strings.append("q")
    made.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    return made


async def read(stub: rpc.SchedulerServiceAsyncStub, message: pb.GenerateRequest) -> Messages:
    return [one async for one in stub.Generate(message)]


def text(messages: Messages, index: int) -> str:
    return "".join(m.delta.text for m in messages if m.index == index)


def ids(messages: Messages, index: int) -> list[int]:
    return [id_ for m in messages if m.index == index for id_ in m.delta.token_ids]


def ends(messages: Messages) -> dict[int, pb.Finished]:
    return {m.index: m.finished for m in messages if m.HasField("finished")}


def continued(first: pb.GenerateRequest, received: Messages) -> pb.GenerateRequest:
    """What a client sends that received these messages of `first`."""
    started = received[0].started
    resumed = pb.GenerateRequest()
    resumed.CopyFrom(first)
    resumed.sampling.CopyFrom(started.sampling)
    resumed.stop.max_tokens = started.max_tokens
    continuation = resumed.continuation
    continuation.prompt_digest = started.prompt_digest
    continuation.model_fingerprint = started.model_fingerprint
    continuation.sampler = started.sampler
    over = ends(received)
    for index in range(first.n):
        continuation.completions.add(
            index=index,
            token_ids=ids(received, index),
            text_bytes=len(text(received, index).encode()),
            finished=index in over,
        )
    return resumed


async def test_every_cut_of_a_stream_continues_it_exactly(stub: rpc.SchedulerServiceAsyncStub) -> None:
    first = request()
    whole = await read(stub, first)
    assert whole[0].HasField("started")
    first.sampling.CopyFrom(whole[0].started.sampling)  # the seed that was drawn
    whole = await read(stub, first)
    for cut in range(1, len(whole)):
        had = whole[:cut]
        if len(ends(had)) == first.n:
            continue
        rest = await read(stub, continued(first, had))
        started = rest[0].started
        assert started.continued_tokens == sum(len(ids(had, index)) for index in range(first.n))
        assert started.prompt_digest == whole[0].started.prompt_digest
        both = had + rest[1:]
        for index in range(first.n):
            assert ids(both, index) == ids(whole, index), (cut, index)
            assert text(both, index) == text(whole, index), (cut, index)
            mine, theirs = ends(both)[index], ends(whole)[index]
            assert (mine.reason, mine.WhichOneof("matched")) == (theirs.reason, theirs.WhichOneof("matched"))
            assert mine.usage.completion_tokens == theirs.usage.completion_tokens
            assert mine.usage.prompt_tokens == theirs.usage.prompt_tokens


MISTAKES = [
    ("prompt_digest", b"other", grpc.StatusCode.FAILED_PRECONDITION),
    ("model_fingerprint", b"other", grpc.StatusCode.FAILED_PRECONDITION),
    ("sampler", "other", grpc.StatusCode.FAILED_PRECONDITION),
]


@pytest.mark.parametrize(("field", "value", "code"), MISTAKES)
async def test_a_continuation_of_something_else_is_refused(
    stub: rpc.SchedulerServiceAsyncStub, field: str, value: object, code: grpc.StatusCode
) -> None:
    first = request()
    resumed = continued(first, (await read(stub, first))[:4])
    setattr(resumed.continuation, field, value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub, resumed)
    assert caught.value.code() is code
    assert field in (caught.value.details() or "")


async def test_bad_continuations_are_refused_by_the_field(stub: rpc.SchedulerServiceAsyncStub) -> None:
    first = request()
    received = (await read(stub, first))[:4]

    async def refused(change: object) -> tuple[grpc.StatusCode, str]:
        resumed = continued(first, received)
        change(resumed)  # type: ignore[operator]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(stub, resumed)
        return caught.value.code(), caught.value.details() or ""

    def no_seed(message: pb.GenerateRequest) -> None:
        message.sampling.ClearField("seed")

    def twice(message: pb.GenerateRequest) -> None:
        message.continuation.completions.add(index=0)

    def beyond(message: pb.GenerateRequest) -> None:
        message.continuation.completions[0].index = 7

    def unknown_id(message: pb.GenerateRequest) -> None:
        message.continuation.completions[0].token_ids[:] = [1 << 20]

    def all_over(message: pb.GenerateRequest) -> None:
        for one in message.continuation.completions:
            one.finished = True

    def too_much_text(message: pb.GenerateRequest) -> None:
        message.continuation.completions[0].finished = False  # it may be, if few messages had all of it
        message.continuation.completions[0].text_bytes = 1 << 20

    def too_many(message: pb.GenerateRequest) -> None:
        message.continuation.completions[0].token_ids[:] = [1] * 25

    invalid = grpc.StatusCode.INVALID_ARGUMENT
    for change, code, name in (
        (no_seed, invalid, "sampling.seed"),
        (twice, invalid, "completions[2].index"),
        (beyond, invalid, "completions[0].index"),
        (unknown_id, invalid, "completions[0].token_ids"),
        (all_over, invalid, "continuation.completions"),
        (too_much_text, grpc.StatusCode.FAILED_PRECONDITION, "border"),
        (too_many, invalid, "continuation"),
    ):
        told = await refused(change)
        assert told[0] is code, (change.__name__, told)
        assert name in told[1], (change.__name__, told)
