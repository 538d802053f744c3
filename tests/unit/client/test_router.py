# ruff: noqa: N802  RPC names are the proto's
"""The router's calls. The test is the process that keeps the models running, and has their schedulers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from paceline.channel import Link, Security, open_aio_channel
from paceline.failover import MODEL_KEY
from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceStub
from paceline.scheduler.v1.scheduler_pb2_grpc import (
    SchedulerServiceServicer,
    SchedulerServiceStub,
    add_SchedulerServiceServicer_to_server,
)
from paceline_router.live_calls import MAX_CALLS
from paceline_router.models import ModelState, ModelUse, RoutedModel, RoutedModels
from paceline_router.server import RouterServer, RouterSettings
from paceline_router.supervisor_connection import Use
from service_kit.identity import token_hash
from service_kit.process import Shutdown

from tests.unit.service.test_refused_calls import uncollected

LIMIT_S = 30.0
"""For what must happen; a test that passes never waits for it."""


class FakeScheduler(SchedulerServiceServicer):
    """It has one live request, whose id is the model's name. It ends it as soon as it `may`."""

    def __init__(self, model: str) -> None:
        self._live, self.may, self.has_ended = {model}, asyncio.Event(), asyncio.Event()
        self.may.set()

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        await self.may.wait()
        found = self._live & {*request.request_ids}
        self._live -= found
        self.has_ended.set()
        return pb.AbortResponse(aborted=found)

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        return pb.ScoreResponse(request_id=request.model)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(running=len(self._live))

    async def WatchSteps(
        self, request: pb.WatchStepsRequest, context: Any
    ) -> AsyncIterator[pb.WatchStepsResponse]:
        yield pb.WatchStepsResponse(log=pb.StepLog(started_us=[1]))
        await self.may.wait()
        yield pb.WatchStepsResponse(log=pb.StepLog(started_us=[2]))


class Routed:
    """A router, and the other end of its socket to `serve`."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._directory, self._version = directory, 0
        self._connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self.server = RouterServer(RouterSettings(supervisor=directory / "supervisor", **settings))
        self._servers = [self.server.server]
        self.channel = open_aio_channel(f"unix:{directory}/router", Link.PUBLIC)
        self.stub = SchedulerServiceStub(self.channel)

    async def start(self) -> None:
        """Take calls, and follow the models."""
        self._listener = await asyncio.start_unix_server(
            lambda *both: self._connections.put_nowait(both), self._directory / "supervisor"
        )
        self.server.server.add_insecure_port(f"unix:{self._directory}/router")
        await self.server.server.start()
        self._following = asyncio.create_task(self.server.run(Shutdown()))
        self._reader, self._writer = await self._connections.get()

    async def tell(self, *models: RoutedModel) -> None:
        """These are the models from now on, and the router knows it."""
        self._version += 1
        self._writer.write(RoutedModels(models, self._version).line())
        while ModelUse.of(await self._reader.readline()).read < self._version:
            pass

    async def used(self, use: Use, name: str) -> None:
        """Wait until a call uses a model so."""
        async with asyncio.timeout(LIMIT_S):
            while name not in getattr(ModelUse.of(await self._reader.readline()), use):
                pass

    async def scheduler(
        self, name: str, state: ModelState = ModelState.SERVING, streams: int = 1000
    ) -> tuple[RoutedModel, FakeScheduler]:
        """A scheduler that runs, and its model as it is told. `streams`: of one connection, at most."""
        options = [("grpc.max_concurrent_streams", streams)]
        server, one = grpc.aio.server(options=options), FakeScheduler(name)
        add_SchedulerServiceServicer_to_server(one, server)
        server.add_insecure_port(f"unix:{self._directory}/{name}")
        await server.start()
        self._servers.append(server)
        return RoutedModel(name, state, f"{self._directory}/{name}"), one

    async def stop(self) -> None:
        """End all of it."""
        self._following.cancel()
        await self.server.close()
        self._writer.close()
        self._listener.close()
        for server in self._servers:
            await server.stop(None)


@pytest.fixture
async def routed(tmp_path: Path) -> AsyncIterator[Routed]:
    one = Routed(tmp_path)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


async def test_an_abort_reaches_a_model_that_is_put_away_and_waits_for_no_other(routed: Routed) -> None:
    first, frozen = await routed.scheduler("first")
    draining, other = await routed.scheduler("draining", ModelState.DRAINING)
    await routed.tell(first, draining)
    frozen.may.clear()
    call = routed.stub.Abort(pb.AbortRequest(request_ids=["draining", "first", "unknown"]), timeout=LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        await other.has_ended.wait()
    frozen.may.set()
    reply = await call
    assert (list(reply.aborted), list(reply.unknown)) == (["draining", "first"], ["unknown"])


def of_model(name: str) -> tuple[tuple[str, str]]:
    return ((MODEL_KEY, name),)


async def test_a_model_that_is_put_away_says_what_it_does_until_it_has_ended(routed: Routed) -> None:
    draining, _ = await routed.scheduler("draining", ModelState.DRAINING)
    await routed.tell(RoutedModel("first", ModelState.SERVING), draining)
    asked = routed.stub.GetStatus(pb.GetStatusRequest(), metadata=of_model("draining"), timeout=LIMIT_S)
    assert (await asked).running == 1
    await routed.tell(RoutedModel("first", ModelState.SERVING), RoutedModel("draining", ModelState.AVAILABLE))
    with pytest.raises(grpc.aio.AioRpcError, match="model draining: available") as refused:
        await routed.stub.GetStatus(pb.GetStatusRequest(), metadata=of_model("draining"), timeout=LIMIT_S)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def channels() -> int:
    gc.collect()
    return sum(issubclass(type(one), grpc.aio.Channel) for one in gc.get_objects())


async def test_nothing_is_kept_of_schedulers_that_have_ended(routed: Routed) -> None:
    """A model that is loaded again has another socket: connections to the old ones would add up."""
    held = channels()
    for number in range(3):
        model, _ = await routed.scheduler(f"m{number}")
        await routed.tell(replace(model, name="m"))
        await routed.stub.GetStatus(pb.GetStatusRequest(), timeout=LIMIT_S)
        assert channels() == held + 1
    await routed.tell(RoutedModel("m", ModelState.AVAILABLE))
    assert channels() == held


async def test_a_stream_goes_on_when_its_scheduler_is_told_no_more(routed: Routed) -> None:
    model, scheduler = await routed.scheduler("m")
    scheduler.may.clear()
    await routed.tell(model)
    steps: Any = routed.stub.WatchSteps(pb.WatchStepsRequest(), timeout=LIMIT_S)
    assert (await steps.read()).log.started_us == [1]
    await routed.tell(RoutedModel("m", ModelState.AVAILABLE))
    scheduler.may.set()
    assert (await steps.read()).log.started_us == [2]
    assert await steps.read() is grpc.aio.EOF


async def test_a_router_that_was_told_no_models_yet_refuses_none_by_its_name(routed: Routed) -> None:
    """As one that is started again under its callers, for whom NOT_FOUND would be the end."""
    calls = (
        routed.stub.WatchSchedulers(pb.WatchSchedulersRequest(), timeout=LIMIT_S),
        routed.stub.GetStatus(pb.GetStatusRequest(), timeout=LIMIT_S),
        routed.stub.Abort(pb.AbortRequest(request_ids=["x"]), timeout=LIMIT_S),
        routed.stub.Score(pb.ScoreRequest(model="m"), timeout=LIMIT_S),
    )
    assert {await call.code() for call in calls} == {grpc.StatusCode.UNAVAILABLE}


async def test_a_change_while_an_earlier_one_is_written_is_told_too(routed: Routed) -> None:
    await routed.tell(RoutedModel("m", ModelState.AVAILABLE))
    watch: Any = routed.stub.WatchSchedulers(pb.WatchSchedulersRequest(), timeout=LIMIT_S)
    assert [one.detail for one in (await watch.read()).entries] == [""]
    for number in range(20):
        await routed.tell(RoutedModel("m", ModelState.LOADING, detail=f"{number}"))
        await routed.tell(RoutedModel("m", ModelState.SERVING, detail=f"{number}"))
        seen = pb.SCHEDULER_STATE_LOADING
        while seen != pb.SCHEDULER_STATE_SERVING:
            [entry] = (await watch.read()).entries
            seen = entry.state
        assert entry.detail == f"{number}"


async def test_calls_that_wait_for_one_model_keep_none_from_waiting_for_another(routed: Routed) -> None:
    x, y = RoutedModel("x", ModelState.LOADING), RoutedModel("y", ModelState.LOADING)
    await routed.tell(x, y)
    flood = [routed.stub.Score(pb.ScoreRequest(model="x")) for _ in range(MAX_CALLS)]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await routed.stub.Score(pb.ScoreRequest(model="x"), timeout=LIMIT_S)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    other = routed.stub.Score(pb.ScoreRequest(model="y"), timeout=LIMIT_S)
    await routed.used("wanted", "y")
    serving, _ = await routed.scheduler("y")
    await routed.tell(x, serving)
    assert (await other).request_id == "y"
    for call in flood:
        call.cancel()


async def test_more_calls_than_a_scheduler_takes_on_one_connection_go_over_another(
    routed: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline_router.calls.MAX_CALLS", 3)
    model, scheduler = await routed.scheduler("m", streams=4)
    await routed.tell(model)
    scheduler.may.clear()
    streams = [routed.stub.WatchSteps(pb.WatchStepsRequest(), timeout=LIMIT_S) for _ in range(8)]
    assert [(await anext(aiter(one))).log.started_us for one in streams] == [[1]] * 8
    assert (await routed.stub.GetStatus(pb.GetStatusRequest(), timeout=LIMIT_S)).running == 1
    scheduler.may.set()
    assert [(await anext(aiter(one))).log.started_us for one in streams] == [[2]] * 8


async def test_the_calls_of_one_identity_keep_none_of_another_from_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline_router.live_calls.MAX_CALLS", 4)
    entries = [f"- {{name: {name}, sha256: {token_hash(name)}}}\n" for name in ("alice", "bob", "carol")]
    (tmp_path / "t.yaml").write_text("".join(entries))
    (tmp_path / "t.yaml").chmod(0o600)
    routed = Routed(tmp_path, tokens_file=tmp_path / "t.yaml")
    await routed.start()

    async def wait_for_the_load(name: str, calls: int) -> set[asyncio.Task[grpc.StatusCode]]:
        """So many calls, and one more, which is refused."""
        metadata = Security(token=name).metadata
        made = [
            routed.stub.Score(pb.ScoreRequest(model="m"), metadata=metadata, timeout=LIMIT_S)
            for _ in range(calls + 1)
        ]
        codes = [asyncio.ensure_future(call.code()) for call in made]
        [refused], waiting = await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
        assert await refused is grpc.StatusCode.RESOURCE_EXHAUSTED
        return waiting

    try:
        await routed.tell(RoutedModel("m", ModelState.LOADING))
        shares = {"alice": 4, "bob": 2, "carol": 1}  # of 4, as they came
        waiting = [await wait_for_the_load(name, calls) for name, calls in shares.items()]
        assert [len(calls) for calls in waiting] == [*shares.values()]
        assert routed.server.metrics.live.by_model() == {"m": 7}
        model, _ = await routed.scheduler("m")
        await routed.tell(model)
        assert {await call for calls in waiting for call in calls} == {grpc.StatusCode.OK}
        assert refused_calls(routed) == {("Score", "QUEUE_FULL"): 3}
    finally:
        await routed.stop()


def refused_calls(routed: Routed) -> dict[tuple[str, str], float]:
    """As they are scraped: by method and reason."""
    samples = [sample for metric in routed.server.metrics.collect() for sample in metric.samples]
    found = [sample for sample in samples if sample.name == "paceline_router_refused_calls_total"]
    return {(sample.labels["method"], sample.labels["reason"]): sample.value for sample in found}


async def test_what_the_router_refuses_itself_is_counted_and_what_a_scheduler_refuses_is_not(
    routed: Routed,
) -> None:
    serving, _ = await routed.scheduler("m")
    await routed.tell(serving, RoutedModel("failed", ModelState.FAILED, may_load=False))
    codes = [await routed.stub.Score(pb.ScoreRequest(model=name)).code() for name in ("nobody", "failed")]
    codes.append(await routed.stub.Embed(pb.EmbedRequest(model="m")).code())  # which it does not have
    assert codes == [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED]
    assert refused_calls(routed) == {("Score", "MODEL_NOT_FOUND"): 1, ("Score", "NOT_READY"): 1}


async def test_an_attempt_to_load_a_model_without_the_right_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(f"- {{name: bob, sha256: {token_hash('sesame')}}}\n")
    (tmp_path / "t.yaml").chmod(0o600)
    routed = Routed(tmp_path, tokens_file=tmp_path / "t.yaml")
    await routed.start()
    try:
        await routed.tell(RoutedModel("m", ModelState.AVAILABLE))
        call = AdminServiceStub(routed.channel).LoadModel(
            admin_pb2.LoadModelRequest(model="m"), metadata=Security(token="sesame").metadata, timeout=LIMIT_S
        )
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        assert refused_calls(routed) == {("LoadModel", "PERMISSION"): 1}
    finally:
        await routed.stop()


async def test_a_router_that_shuts_down_does_not_say_that_a_model_was_put_away(routed: Routed) -> None:
    model, _ = await routed.scheduler("m")
    await routed.tell(model)
    stub = AdminServiceStub(routed.channel)
    unload = stub.UnloadModel(admin_pb2.UnloadModelRequest(model="m"), timeout=LIMIT_S)
    await routed.used("unwanted", "m")
    await routed.server.drain(Shutdown())
    assert await unload.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["nobody", "failed"])
async def test_a_refused_call_leaves_nothing_to_the_garbage_collector(routed: Routed, name: str) -> None:
    await routed.tell(RoutedModel("failed", ModelState.FAILED, may_load=False))
    await routed.stub.Score(pb.ScoreRequest(model=name)).code()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            assert await routed.stub.Score(pb.ScoreRequest(model=name)).code() is not grpc.StatusCode.OK
        assert uncollected("RPCState") == 0
    finally:
        gc.enable()
