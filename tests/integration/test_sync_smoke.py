"""The public API from a plain blocking stub: pytest-grpc's channel and stub, on the real processes."""

import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc

from tests.support.stack import Stack, oracle_stack


@pytest.fixture(scope="module")
def grpc_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """In place of pytest-grpc's in-process server."""
    with oracle_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(scope="module")
def grpc_addr(grpc_server: Stack) -> str:
    return grpc_server.scheduler.address


@pytest.fixture(scope="module")
def grpc_stub_cls() -> Any:
    return scheduler_pb2_grpc.SchedulerServiceStub


def request(text: str = "Once upon a time", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingParams(**sampling),
        stop=pb.StopConditions(max_tokens=12, ignore_eos=True),
    )


def test_a_stream_is_deltas_and_one_finish(grpc_stub: Any) -> None:
    replies = list(grpc_stub.Generate(request(temperature=0.0)))
    deltas = ["delta"] * (len(replies) - 2)
    assert [reply.WhichOneof("event") for reply in replies[:-1]] == ["started", *deltas]
    assert replies[-1].finished.reason == pb.FINISH_REASON_LENGTH
    assert replies[-1].finished.usage.completion_tokens == 12


def test_streamed_and_collected_are_the_same(grpc_stub: Any) -> None:
    asked = request(temperature=1.0, seed=random.Random(5).getrandbits(64))
    streamed = [token for reply in grpc_stub.Generate(asked) for token in reply.delta.token_ids]
    collected = grpc_stub.GenerateUnary(pb.GenerateUnaryRequest(request=asked))
    assert list(collected.completions[0].token_ids) == streamed


def test_tokens_make_the_round_trip(grpc_stub: Any) -> None:
    ids = grpc_stub.Tokenize(pb.TokenizeRequest(text="paceline")).token_ids
    assert grpc_stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "paceline"


def test_a_bad_request_names_its_field(grpc_stub: Any) -> None:
    with pytest.raises(grpc.RpcError, match="top_p") as caught:
        list(grpc_stub.Generate(request(top_p=2.0)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_info_and_status_agree_with_what_was_done(grpc_stub: Any) -> None:
    assert grpc_stub.GetModelInfo(pb.GetModelInfoRequest()).vocab_size > 0
    before = grpc_stub.GetStatus(pb.GetStatusRequest())
    list(grpc_stub.Generate(request()))
    after = grpc_stub.GetStatus(pb.GetStatusRequest())
    assert (after.requests - before.requests, after.finished - before.finished) == (1, 1)
    assert after.completion_tokens - before.completion_tokens == 12
