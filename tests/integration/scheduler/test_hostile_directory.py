"""A large directory and its worst clients: strangers, floods, and watchers that do not read."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from paceline import aio
from paceline.channel import Link, Security, open_aio_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from service_kit.identity import token_hash

from tests.support.ports import kept_port
from tests.support.processes import ServiceProcess
from tests.support.stack import Stack

WRITERS, WATCHERS, CHANNELS, FLOOD = 1000, 1000, 8, 500


def resident_mib(process: ServiceProcess) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def entry(number: int) -> pb.SchedulerEntry:
    """As large as one may be, or nearly so."""
    one = pb.SchedulerEntry(address=f"10.0.{number >> 8}.{number & 255}:50051", generation=1)
    one.model, one.instance, one.model_fingerprint = "m" * 1000, f"i{number}", b"f" * 32
    one.adapters.extend(f"{adapter:0>127}" for adapter in range(8))
    return one


@pytest.mark.slow
async def test_a_directory_survives_floods_and_a_thousand_watchers_that_do_not_read(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        f"- {{name: client, sha256: {token_hash('client')}}}\n"
        + "".join(
            f"- {{name: w{number}, sha256: {token_hash(f'w{number}')}, directory: true}}\n"
            for number in range(WRITERS)
        )
    )
    tokens.chmod(0o600)
    stack, port = Stack(tmp_path), kept_port()
    flags = ["--executor", stack.start_executor(), "--port", str(port), "--tokens-file", str(tokens)]
    scheduler = ServiceProcess(
        "scheduler_service", [*flags, "--advertise", f"127.0.0.1:{port}"], tmp_path / "scheduler"
    )
    try:
        scheduler.wait_serving()
        async with AsyncExitStack() as channels:
            stubs = [
                SchedulerServiceStub(
                    await channels.enter_async_context(open_aio_channel(scheduler.address, Link.PUBLIC))
                )
                for _ in range(CHANNELS)
            ]

            async def announce(number: int, who: str) -> str:
                request = pb.AnnounceSchedulerRequest(entry=entry(number), ttl_ms=600_000)
                try:
                    await stubs[0].AnnounceScheduler(request, metadata=Security(token=who).metadata)
                except grpc.aio.AioRpcError as error:
                    return error.code().name
                return "OK"

            async def flood(number: int, who: str) -> Counter[str]:
                return Counter(await asyncio.gather(*(announce(number + each, who) for each in range(FLOOD))))

            assert await flood(5000, "client") == {"PERMISSION_DENIED": FLOOD}
            assert await flood(5000, "nobody") == {"UNAUTHENTICATED": FLOOD}
            for number in range(WRITERS):
                assert await announce(number, f"w{number}") == "OK"
            moved = await flood(5000, "w0")
            assert moved.keys() == {"OK", "RESOURCE_EXHAUSTED"}
            assert moved["OK"] < FLOOD / 10  # one in 5 s
            before = resident_mib(scheduler)
            watching = Security(token="client").metadata
            calls = [
                stubs[number % CHANNELS].WatchSchedulers(pb.WatchSchedulersRequest(), metadata=watching)
                for number in range(WATCHERS)
            ]
            for call in calls:
                await call.initial_metadata()  # it has begun
            for number in range(1, WRITERS):  # watchers would hold these beside the former ones
                assert await announce(number, f"w{number}") == "OK"
            assert resident_mib(scheduler) - before < 150
            async with aio.Client(scheduler.address, security=Security(token="client")) as client:
                await client.complete(token_ids=[1], max_tokens=1)
            for call in calls:
                call.cancel()
        assert scheduler.running
    finally:
        scheduler.kill()
        stack.kill()
