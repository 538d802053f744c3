"""Work that a client asked of an executor ends when the client disconnects, except a drain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from paceline.channel import Link, open_channel
from paceline.executor.v1 import executor_pb2 as pb
from paceline.executor.v1 import executor_pb2_grpc as rpc

from tests.support.processes import running

ATTEMPTS = 20  # a machine that stands still may let a step end before its client has left
TOKENS = 8192


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc.ExecutorServiceStub]:
    """An oracle that takes 0.8 s for the longest prompt, in four pieces."""
    arguments = ["--backend", "oracle", "--token-us", "100", "--pages", "2000"]
    with (
        running("executor_service", arguments, tmp_path_factory.mktemp("executor")) as process,
        open_channel(process.address, Link.PRIVATE) as channel,
    ):
        yield rpc.ExecutorServiceStub(channel)


def status(stub: rpc.ExecutorServiceStub) -> pb.GetStatusResponse:
    return stub.GetStatus(pb.GetStatusRequest(), timeout=30)


def cancelled(stub: rpc.ExecutorServiceStub, method: Any, request: Any) -> None:
    call = method.future(request, timeout=30)
    while not call.done() and not status(stub).step_age_s:
        pass
    call.cancel()


def expired(stub: rpc.ExecutorServiceStub, method: Any, request: Any) -> None:
    call = method.future(request, timeout=0.1)
    assert call.exception() is None or call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("leave", [cancelled, expired])
def test_a_long_prefill_is_given_up_and_nothing_of_it_stays(
    stub: rpc.ExecutorServiceStub, leave: Callable[..., None]
) -> None:
    """Told by the tokens that were computed: all of them, or none."""
    for attempt in range(ATTEMPTS):
        before, cache_id = status(stub), 1 + 2 * attempt + (leave is expired)
        opening = pb.Opening(cache_id=cache_id, tokens=[cache_id] * TOKENS, salt=leave.__name__.encode())
        leave(stub, stub.Prefill, pb.PrefillRequest(step=pb.Step(openings=[opening])))
        other = pb.Opening(cache_id=99 + cache_id, tokens=[1, 2, 3])
        stub.Prefill(pb.PrefillRequest(step=pb.Step(openings=[other])), timeout=30)
        after = status(stub)
        released = pb.Release(cache_ids=[cache_id, 99 + cache_id])
        reply = stub.ReleaseCache(pb.ReleaseCacheRequest(release=released), timeout=30)
        assert status(stub).cache.owned_pages == 0
        if after.tokens_computed == before.tokens_computed + 3:
            assert after.sequences == 1
            assert reply.result.ops[0].released == 1
            return
        assert after.tokens_computed == before.tokens_computed + TOKENS + 3
    raise AssertionError("every step was computed to its end")


def test_a_drain_continues_after_its_caller_has_disconnected(tmp_path: Path) -> None:
    with (
        running("executor_service", ["--backend", "oracle"], tmp_path) as process,
        open_channel(process.address, Link.PRIVATE) as channel,
    ):
        stub = rpc.ExecutorServiceStub(channel)

        def open_(cache_id: int) -> pb.PrefillResponse:
            step = pb.Step(openings=[pb.Opening(cache_id=cache_id, tokens=[1])])
            return stub.Prefill(pb.PrefillRequest(step=step), timeout=30)

        open_(1)
        drain = stub.Drain.future(pb.DrainRequest(), timeout=30)
        while status(stub).state != pb.EXECUTOR_STATE_DRAINING:
            assert not drain.done()
        drain.cancel()
        with pytest.raises(grpc.RpcError, match="draining"):
            open_(2)
        assert status(stub).state == pb.EXECUTOR_STATE_DRAINING
