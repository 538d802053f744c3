"""Hostile public traffic: every answer is a named error, a bystander's tokens don't change, nothing leaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc.aio
import pytest
from paceline.executor.v1 import executor_pb2 as executor_pb
from paceline.executor.v1 import executor_pb2_grpc as executor_rpc
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc as rpc

from tests.fuzz import public_traffic
from tests.support.processes import ServiceProcess
from tests.support.untyped import raw

ALLOWED = {
    "OK",
    "left",
    "INVALID_ARGUMENT",
    "RESOURCE_EXHAUSTED",
    "ALREADY_EXISTS",
    "DEADLINE_EXCEEDED",  # ours: asked for very much
    "ABORTED",  # by a hostile Abort
    "NOT_FOUND",  # a model of another name
    "FAILED_PRECONDITION",  # a continuation of something else
    "UNIMPLEMENTED",  # a field whose feature is missing
}


async def canary(stub: rpc.SchedulerServiceAsyncStub, new: int) -> list[int]:
    request = pb.GenerateRequest(
        request_id=f"canary-{new}-{time.monotonic_ns()}",
        token_ids=pb.TokenIds(ids=range(1, 40)),
        sampling=pb.SamplingParams(temperature=0.9, top_p=0.9, seed=5),
        stop=pb.StopConditions(max_tokens=new, ignore_eos=True),
        priority=100,
    )
    return [token async for event in stub.Generate(request) for token in event.delta.token_ids]


async def test_hostile_requests_harm_nobody(
    executor: ServiceProcess, scheduler: ServiceProcess, count: int
) -> None:
    await check_traffic(executor, scheduler, count, public_traffic.RPCS)


@pytest.mark.slow
async def test_ten_thousand_hostile_evaluations_harm_nobody(
    executor: ServiceProcess, scheduler: ServiceProcess
) -> None:
    await check_traffic(executor, scheduler, 10_000, public_traffic.EVALUATIONS)


async def check_traffic(
    executor: ServiceProcess,
    scheduler: ServiceProcess,
    count: int,
    rpcs: Sequence[str],
    models: Sequence[str] = ("",),
) -> None:
    """Requests to these RPCs that name these models harm nobody."""
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        stub = rpc.SchedulerServiceStub(channel)
        vocab_size = (await stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size
        expected = await canary(stub, 200)
        hostile = asyncio.create_task(
            public_traffic.run(channel, vocab_size, count, count, rpcs=rpcs, models=models)
        )
        checked = 0
        while not hostile.done():
            assert await canary(stub, 200) == expected
            checked += 1
        codes = await hostile
        print(dict(codes), f"canaries: {checked}")
        assert checked
        assert codes.keys() <= ALLOWED
        assert codes["OK"] > count / 20, "the traffic never got past the first checks"
        assert scheduler.running
        assert executor.running
        deadline = time.monotonic() + 60  # what its client gave up ends a little later
        while (status := await stub.GetStatus(pb.GetStatusRequest())).running or status.waiting:
            assert time.monotonic() < deadline, "requests that nobody waits for go on"
            await asyncio.sleep(0.05)
    async with grpc.aio.insecure_channel(executor.address) as channel:
        executor_stub = executor_rpc.ExecutorServiceStub(channel)
        deadline = time.monotonic() + 60  # releases ride in the step after the last
        while (cache := (await executor_stub.GetStatus(executor_pb.GetStatusRequest())).cache).owned_pages:
            assert time.monotonic() < deadline, "pages leaked"
            await asyncio.sleep(0.05)
        assert cache.free_pages + cache.cached_pages == cache.total_pages


async def test_bytes_that_are_no_message_are_refused(scheduler: ServiceProcess) -> None:
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        unary = raw(channel).unary_unary("/paceline.scheduler.v1.SchedulerService/GenerateUnary")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unary(b"\xff" * 100, timeout=10)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        streaming = raw(channel).unary_stream("/paceline.scheduler.v1.SchedulerService/Generate")
        call = streaming(b"\xff" * 100, timeout=10)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
