"""Clients of several schedulers, which die, refuse and come back at chosen points."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import paceline
import pytest
from google.rpc import code_pb2
from paceline import aio, errors
from paceline.channel import Link, server_options
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc
from paceline.types import Completion

from tests.unit.client.fake_scheduler import rich_status
from tests.unit.client.ideal_scheduler import ids_of, replies

SEED = 3  # its completion 0 has five tokens
Ending = Callable[[Any], Awaitable[None]]


def status(code: int, reason: str, retry_after_s: float | None = None) -> Ending:
    """What a scheduler says itself."""
    return lambda context: context.abort_with_status(rich_status(code, "why", reason, retry_after_s))


def broken(context: Any) -> Awaitable[None]:
    """What gRPC makes of a connection that breaks."""
    ended: Awaitable[None] = context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    return ended


@dataclass
class Fake(scheduler_pb2_grpc.SchedulerServiceServicer):
    """An ideal scheduler. Each call takes the next ending of the script: (messages before it, how)."""

    script: list[tuple[int, Ending]] = field(default_factory=list)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    live: set[str] = field(default_factory=set)

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        after, end = self.script.pop(0) if self.script else (None, None)
        for number, message in enumerate(replies(request, random.Random(1))):
            if number == after and end is not None:
                await end(context)
            yield message
        if end is not None:  # after all messages
            await end(context)

    async def GenerateUnary(  # noqa: N802
        self, request: pb.GenerateUnaryRequest, context: Any
    ) -> pb.GenerateUnaryResponse:
        self.requests.append(request.request)
        if self.script:
            await self.script.pop(0)[1](context)
        end = pb.Finished(reason=pb.FINISH_REASON_STOP)
        ids = ids_of(request.request.sampling.seed, 0, 10)
        return pb.GenerateUnaryResponse(completions=[pb.Completion(token_ids=ids, finished=end)])

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
        return pb.AbortResponse(aborted=[one for one in request.request_ids if one in self.live])

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:  # noqa: N802
        return pb.GetStatusResponse(running=7)


@asynccontextmanager
async def served(*fakes: Fake) -> AsyncIterator[list[str]]:
    servers, addresses = [], []
    for fake in fakes:
        server = grpc.aio.server(options=server_options(Link.PUBLIC))
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        yield addresses
    finally:
        for server in servers:
            await server.stop(None)


async def blocking(addresses: list[str], use: Callable[[Any], Any], **options: Any) -> Any:
    def call() -> Any:
        with paceline.Client(addresses, **options) as client:
            return use(client)

    return await asyncio.to_thread(call)


async def asynchronous(addresses: list[str], use: Callable[[Any], Any], **options: Any) -> Any:
    async with aio.Client(addresses, **options) as client:
        return await use(client)


Run = Callable[..., Awaitable[Any]]
both = pytest.mark.parametrize("run", [blocking, asynchronous])


def collect(**options: Any) -> Callable[[Any], Any]:
    return lambda client: client.generate("x", **({"seed": SEED} | options)).collect()


async def undisturbed(**options: Any) -> list[Completion]:
    async with served(Fake()) as addresses:
        result: list[Completion] = await asynchronous(addresses, collect(**options))
        return result


def same(got: list[Completion], expected: list[Completion]) -> bool:
    """But for times."""

    def parts(one: Completion) -> tuple[object, ...]:
        assert one.finished is not None
        return one.text, one.token_ids, one.logprobs, one.finished.usage.completion_tokens

    return [parts(one) for one in got] == [parts(one) for one in expected]


@both
@pytest.mark.parametrize("end", [broken, status(code_pb2.UNAVAILABLE, "SHUTTING_DOWN")])
@pytest.mark.parametrize("after", range(7))
@pytest.mark.parametrize("returns", ["both", "text"])
async def test_a_stream_whose_scheduler_dies_goes_on_on_another(
    run: Run, end: Ending, after: int, returns: str
) -> None:
    expected = await undisturbed(n=2, returns=returns)
    fakes = Fake([(after, end)]), Fake([(after, end)])
    async with served(*fakes) as addresses:
        if after == 0 and end is not broken:  # refused by both
            with pytest.raises(errors.Unavailable):
                await run(addresses, collect(n=2, returns=returns))
            return
        assert same(await run(addresses, collect(n=2, returns=returns)), expected)
    requests = [*fakes[0].requests, *fakes[1].requests]
    assert len({one.request_id for one in requests}) == 1
    assert any(one.HasField("continuation") for one in requests) == (after > 1)


@both
async def test_a_stream_goes_on_on_the_same_scheduler_if_there_is_no_other(run: Run) -> None:
    expected = await undisturbed()
    fake = Fake([(2, broken), (0, status(code_pb2.UNAVAILABLE, "NOT_READY", 0.01)), (2, broken)])
    async with served(fake) as addresses:
        assert same(await run(addresses, collect()), expected)
    assert [one.HasField("continuation") for one in fake.requests] == [False, True, True, True]


@both
async def test_a_connection_that_breaks_after_the_last_end_has_lost_nothing(run: Run) -> None:
    expected = await undisturbed()
    fake = Fake([(99, broken)])
    async with served(fake) as addresses:
        assert same(await run(addresses, collect()), expected)
    assert len(fake.requests) == 1


@both
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (code_pb2.ABORTED, errors.Cancelled),
        (code_pb2.CANCELLED, errors.Cancelled),
        (code_pb2.INTERNAL, errors.InternalError),
        (code_pb2.DATA_LOSS, errors.InternalError),
        (code_pb2.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (code_pb2.RESOURCE_EXHAUSTED, errors.StreamLost),
    ],
)
async def test_a_stream_that_was_ended_on_purpose_is_not_continued(
    run: Run, code: int, kind: type[errors.PacelineError]
) -> None:
    fakes = Fake([(2, status(code, "WHY"))]), Fake([(2, status(code, "WHY"))])
    async with served(*fakes) as addresses:
        with pytest.raises(kind):
            await run(addresses, collect())
    assert len(fakes[0].requests) + len(fakes[1].requests) == 1


@both
async def test_a_continuation_of_something_else_is_an_error_that_says_so(run: Run) -> None:
    mismatch = status(code_pb2.FAILED_PRECONDITION, "CONTINUATION")
    async with served(Fake([(2, broken), (0, mismatch)])) as addresses:
        with pytest.raises(errors.StaleState, match=r"could not be continued: why \(127"):
            await run(addresses, collect())


@both
async def test_a_stream_that_nobody_continues_is_lost_and_not_to_be_sent_again(run: Run) -> None:
    refuse = (0, status(code_pb2.UNAVAILABLE, "NOT_READY", 0.01))
    async with served(Fake([(2, broken), *[refuse] * 9])) as addresses:
        with pytest.raises(errors.StreamLost, match="could not be continued") as caught:
            await run(addresses, collect(), failover_timeout_s=0.05)
        assert not isinstance(caught.value, errors.RetryLater)


@both
@pytest.mark.parametrize("unary", [False, True])
@pytest.mark.parametrize("code", [code_pb2.UNAVAILABLE, code_pb2.RESOURCE_EXHAUSTED])
async def test_what_one_refuses_is_taken_by_another_and_told_if_all_refuse(
    run: Run, unary: bool, code: int
) -> None:
    def use(client: Any) -> Any:
        return client.completions("x", seed=SEED) if unary else client.generate("x", seed=SEED).collect()

    def refuse(after_s: float) -> tuple[int, Ending]:
        return 0, status(code, "WHY", after_s)

    async with served(Fake([refuse(9)]), Fake(), Fake([refuse(9)])) as addresses:
        assert list((await run(addresses, use))[0].token_ids) == ids_of(SEED, 0, 10)
    async with served(Fake([refuse(9)]), Fake([refuse(4)])) as addresses:
        with pytest.raises(errors.RetryLater) as caught:
            await run(addresses, use)
        assert caught.value.retry_after_s == 4


@both
async def test_a_unary_call_that_was_lost_is_sent_again_as_it_was(run: Run) -> None:
    fakes = Fake([(0, broken)]), Fake([(0, broken)])
    async with served(*fakes) as addresses:
        await run(addresses, lambda client: client.completions("x"))
    first, *others = [one.SerializeToString(deterministic=True) for f in fakes for one in f.requests]
    assert len(others) == 2
    assert set(others) == {first}


@both
async def test_calls_go_where_their_beginning_is_and_those_of_a_dead_scheduler_to_the_others(
    run: Run,
) -> None:
    """One after the other; of those at the same time each scheduler gets its share."""
    fakes = Fake(), Fake()

    def four(client: Any) -> Any:
        return [client.completions("x") for _ in range(4)]

    async def gathered(client: Any) -> None:
        await asyncio.gather(*four(client))

    async with served(*fakes) as addresses:
        await run(addresses, gathered if run is asynchronous else four)
        assert sorted(len(fake.requests) for fake in fakes) == ([1, 3] if run is asynchronous else [0, 4])
        await run(["127.0.0.1:1", *addresses], gathered if run is asynchronous else four)
        assert sum(len(fake.requests) for fake in fakes) == 8
        assert await run(["127.0.0.1:1", *addresses], lambda client: client.status())
    with pytest.raises(errors.Unavailable):
        await run(addresses, lambda client: client.status())


@both
async def test_abort_reaches_a_request_wherever_it_runs(run: Run) -> None:
    async with served(Fake(live={"a"}), Fake(live={"b"})) as addresses:
        done = await run([*addresses, "127.0.0.1:1"], lambda client: client.abort(["c", "b", "a"]))
        assert (done.aborted, done.unknown) == (("b", "a"), ("c",))
    with pytest.raises(errors.Unavailable):
        await run(["127.0.0.1:1"], lambda client: client.abort(["a"]))


@both
async def test_abort_asks_all_schedulers_at_once_so_that_one_timeout_is_enough(run: Run) -> None:
    everyone = asyncio.Barrier(2)

    class Waits(Fake):
        async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:  # noqa: N802
            await everyone.wait()
            return await super().Abort(request, context)

    async with served(Waits(live={"a"}), Waits(live={"b"})) as addresses:
        done = await run(addresses, lambda client: client.abort(["a", "b"], timeout_s=60))
    assert done.aborted == ("a", "b")


@both
async def test_closing_ends_a_stream_that_waits_for_a_scheduler(run: Run) -> None:
    waits = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def refuse(context: Any) -> None:
        loop.call_soon_threadsafe(waits.set)
        await status(code_pb2.UNAVAILABLE, "NOT_READY", 3600)(context)

    async with served(Fake([(2, broken), (0, refuse)])) as addresses:
        if run is asynchronous:
            async with aio.Client(addresses, failover_timeout_s=3600) as client:
                generation = client.generate("x", seed=SEED)
                reader = asyncio.create_task(generation.collect())
                await waits.wait()
                generation.close()
                assert await reader
        else:
            with paceline.Client(addresses, failover_timeout_s=3600) as blocking_client:
                blocked = blocking_client.generate("x", seed=SEED)
                thread = asyncio.create_task(asyncio.to_thread(blocked.collect))
                await waits.wait()
                blocked.close()
                assert await thread


@both
async def test_a_stream_says_what_it_was_started_with(run: Run) -> None:
    def read(client: paceline.Client) -> paceline.Generation:
        generation = client.generate("x", seed=SEED, max_tokens=9)
        assert generation.started is None
        generation.collect()
        return generation

    async def read_async(client: aio.Client) -> aio.Generation:
        generation = client.generate("x", seed=SEED, max_tokens=9)
        await generation.collect()
        return generation

    async with served(Fake()) as addresses:
        generation = await run(addresses, read_async if run is asynchronous else read)
    started = generation.started
    assert (started.seed, started.max_tokens, started.prompt_tokens) == (SEED, 9, 5)
    assert started.sampling["temperature"] == 0.5
    assert generation.resumptions == 0
