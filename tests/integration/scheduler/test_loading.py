"""Calls that come before the model: they wait at the scheduler, and hear why it can't be loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from paceline import aio, errors
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

from tests.support.ports import kept_port
from tests.support.processes import ServiceProcess
from tests.support.stack import eventually

ORACLE = ("--backend", "oracle")
LONG_S = 60.0


class Services:
    """A scheduler whose executor is started later, on a port that it keeps."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._port = directory, kept_port()
        self._executors: list[ServiceProcess] = []
        flags = ["--executor", f"127.0.0.1:{self._port}"]
        self.scheduler = ServiceProcess("scheduler_service", flags, directory / "scheduler")

    def start_executor(self, *flags: str) -> ServiceProcess:
        place = self._directory / f"executor{len(self._executors)}"
        arguments = [*ORACLE, *flags, "--port", str(self._port)]
        self._executors.append(ServiceProcess("executor_service", arguments, place))
        return self._executors[-1]

    def kill(self) -> None:
        for process in (self.scheduler, *self._executors):
            process.kill()

    @asynccontextmanager
    async def client(self, failover_timeout_s: float = LONG_S) -> AsyncIterator[aio.Client]:
        async with aio.Client(self.scheduler.address, failover_timeout_s=failover_timeout_s) as client:
            yield client


@asynccontextmanager
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    made = Services(tmp_path)
    try:
        yield made
    finally:
        made.kill()


async def test_calls_of_all_kinds_wait_for_the_model_and_none_for_its_status(tmp_path: Path) -> None:
    async with services(tmp_path) as made, made.client() as client:
        whole = asyncio.create_task(client.complete("Grüße", max_tokens=3, ignore_eos=True, seed=1))
        text = asyncio.create_task(client.generate("Grüße", max_tokens=3, ignore_eos=True, seed=1).text())
        info, tokens = asyncio.create_task(client.model_info()), asyncio.create_task(client.tokenize("Grüße"))
        assert (await client.status()).state == "loading"
        assert not any(call.done() for call in (whole, text, info, tokens))
        await asyncio.to_thread(made.start_executor)
        assert (await whole).text == await text
        assert (await info).name == "oracle"
        assert await tokens


async def test_a_caller_is_told_why_the_model_can_not_be_loaded(tmp_path: Path) -> None:
    async with services(tmp_path) as made, made.client() as client:
        await client.status()
        call = asyncio.create_task(client.complete("Grüße"))

        async def is_told() -> bool:
            # An executor that failed answers for a second; a machine that stands still may miss it.
            failing = await asyncio.to_thread(made.start_executor, "--kv-memory", "1")
            assert await asyncio.to_thread(failing.wait, LONG_S) == 78
            return call.done()

        await eventually(is_told, "the failure is not told")
        with pytest.raises(errors.Unavailable, match="--kv-memory 1 does not hold") as caught:
            await call
        assert caught.value.retry_after_s is None
        await asyncio.to_thread(made.start_executor)  # the next one can
        while (await client.status()).state == "loading":  # noqa: ASYNC110  # no call is to be refused
            await asyncio.sleep(0.02)
        assert (await client.complete("Grüße", max_tokens=3, ignore_eos=True)).token_ids


async def test_a_wait_ends_in_time_for_its_deadline_and_with_the_reason(tmp_path: Path) -> None:
    async with services(tmp_path) as made:
        async with made.client() as client:
            with pytest.raises(errors.Unavailable, match="no executor yet"):
                await client.model_info(timeout_s=2.0)
        async with made.client(failover_timeout_s=0.1) as client:
            began = time.monotonic()
            with pytest.raises(errors.Unavailable, match="no executor yet"):
                await client.complete("Grüße")
            assert time.monotonic() - began >= 0.1


async def test_what_is_no_number_of_milliseconds_waits_for_nothing(tmp_path: Path) -> None:
    async with services(tmp_path) as made, grpc.aio.insecure_channel(made.scheduler.address) as channel:
        for value in ("", "-1", "1e9", "3 s", "9" * 10, "0"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await SchedulerServiceStub(channel).GetModelInfo(
                    pb.GetModelInfoRequest(), metadata=(("paceline-wait-ms", value),), timeout=LONG_S
                )
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
