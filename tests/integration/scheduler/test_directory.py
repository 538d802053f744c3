"""Schedulers tell each other of themselves, and clients that know one of them learn of the others."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from paceline import aio
from paceline.channel import Link, Metadata, Security, open_aio_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from service_kit.identity import token_hash

from tests.support.ports import kept_port
from tests.support.processes import ServiceProcess
from tests.support.stack import Stack

pytestmark = pytest.mark.long

TOKENS = {"client": "client's", "admin": "admin's", "actor": "actor's", "other": "other's", "peer": "peer's"}
TIMEOUT_S = 60.0


@dataclass
class Fleet:
    """Three schedulers of one executor. The third knows the others, and the others know the third alone."""

    schedulers: list[ServiceProcess]
    stack: Stack


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    tokens, secret = directory / "tokens.yaml", directory / "peer-token"
    tokens.write_text(
        "".join(
            f"- {{name: {name}, sha256: {token_hash(token)}, admin: {str(name == 'admin').lower()},"
            f" directory: {str(name in ('actor', 'other')).lower()}}}\n"
            for name, token in TOKENS.items()
        )
    )
    secret.write_text(TOKENS["peer"])
    for file in (tokens, secret):
        file.chmod(0o600)
    stack, ports = Stack(directory), [kept_port() for _ in range(3)]
    schedulers: list[ServiceProcess] = []
    try:
        executor = stack.start_executor("--step-ms", "5")
        for number, port in enumerate(ports):
            flags = ["--executor", executor, "--port", str(port), "--advertise", f"127.0.0.1:{port}"]
            flags += ["--tokens-file", str(tokens), "--peer-token-file", str(secret)]
            for peer in ports[:2] if number == 2 else ports[2:]:
                flags += ["--peer", f"127.0.0.1:{peer}"]
            process = ServiceProcess("scheduler_service", flags, directory / f"scheduler{number}")
            schedulers.append(process)
        for process in schedulers:
            process.wait_serving()
        yield Fleet(schedulers, stack)
    finally:
        for process in schedulers:
            process.kill()
        stack.kill()


def of(name: str) -> Metadata:
    return Security(token=TOKENS[name]).metadata


@asynccontextmanager
async def stub_of(process: ServiceProcess) -> AsyncIterator[Any]:
    async with asyncio.timeout(TIMEOUT_S), open_aio_channel(process.address, Link.PUBLIC) as channel:
        yield SchedulerServiceStub(channel)


class View:
    """What a watcher knows."""

    def __init__(self, stub: Any, who: str = "client") -> None:
        self.call: Any = stub.WatchSchedulers(pb.WatchSchedulersRequest(), metadata=of(who))
        self.entries: dict[str, pb.SchedulerEntry] = {}
        self.complete = False

    async def read(self) -> None:
        message = await self.call.read()
        assert isinstance(message, pb.WatchSchedulersResponse)
        for address in message.removed:
            self.entries.pop(address, None)
        for entry in message.entries:
            self.entries[entry.address] = entry
        self.complete |= message.complete

    async def until_serving(self, addresses: set[str]) -> None:
        """Read until exactly these serve."""
        while not self.complete or self.serving != addresses:
            await self.read()

    @property
    def serving(self) -> set[str]:
        serving = pb.SCHEDULER_STATE_SERVING
        return {address for address, entry in self.entries.items() if entry.state == serving}


def entry(address: str, generation: int = 1) -> pb.SchedulerEntry:
    return pb.SchedulerEntry(
        address=address,
        model="oracle",
        generation=generation,
        instance=f"of-{address}",
        state=pb.SCHEDULER_STATE_SERVING,
    )


async def test_a_scheduler_tells_of_itself_and_of_its_peers_by_their_own_word(fleet: Fleet) -> None:
    addresses = [process.address for process in fleet.schedulers]
    for process, known in zip(
        fleet.schedulers, ([0, 2], [1, 2], [0, 1, 2]), strict=True
    ):  # no scheduler tells what it heard of a third
        async with stub_of(process) as stub:
            view = View(stub)
            await view.until_serving({addresses[which] for which in known})
            own = view.entries[process.address]
            assert (own.written_by, own.model, own.load.seats > 0) == ("", "oracle", True)
            assert len({one.model_fingerprint for one in view.entries.values()}) == 1
            for address in view.entries.keys() - {process.address}:
                assert view.entries[address].written_by == f"peer {address}"


async def test_one_with_the_right_announces_a_scheduler_and_nobody_forges_anothers_entry(
    fleet: Fleet,
) -> None:
    async def refused(stub: Any, who: str, one: pb.SchedulerEntry) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.AnnounceScheduler(pb.AnnounceSchedulerRequest(entry=one), metadata=of(who))
        return caught.value.code()

    first, _, third = (process.address for process in fleet.schedulers)
    async with stub_of(fleet.schedulers[0]) as stub:
        view = View(stub)
        for who in ("client", "admin", "peer"):
            assert await refused(stub, who, entry("10.0.0.1:50051")) is grpc.StatusCode.PERMISSION_DENIED
        await view.until_serving({first, third})
        for address in (first, third):
            assert await refused(stub, "actor", entry(address, 1 << 62)) is grpc.StatusCode.ALREADY_EXISTS

        async def announce(one: pb.SchedulerEntry, ttl_ms: int = 0) -> int:
            request = pb.AnnounceSchedulerRequest(entry=one, ttl_ms=ttl_ms)
            return int((await stub.AnnounceScheduler(request, metadata=of("actor"))).ttl_ms)

        assert await announce(entry("10.0.0.1:50051", 5)) == 30_000
        await view.until_serving({first, third, "10.0.0.1:50051"})
        assert view.entries["10.0.0.1:50051"].written_by == "actor"
        assert await refused(stub, "other", entry("10.0.0.1:50051", 9)) is grpc.StatusCode.ALREADY_EXISTS
        old = entry("10.0.0.2:50051", 4)
        assert await refused(stub, "actor", old) is grpc.StatusCode.FAILED_PRECONDITION
        # It is the writer's only entry, and goes when it is not written again.
        assert await announce(entry("10.0.0.2:50051", 5), ttl_ms=1000) == 1000
        await view.until_serving({first, third, "10.0.0.2:50051"})
        await view.until_serving({first, third})


async def test_a_client_that_knows_one_scheduler_uses_all_and_streams_of_a_lost_one_go_on(
    fleet: Fleet,
) -> None:
    def stream(number: int) -> aio.Generation:
        return client.generate(token_ids=[1, 2], max_tokens=150, seed=7, affinity_key=str(number))

    security = Security(token=TOKENS["client"])
    addresses = {process.address for process in fleet.schedulers}
    async with (
        asyncio.timeout(TIMEOUT_S),
        aio.Client(fleet.schedulers[2].address, security=security) as client,
    ):
        [alone] = await stream(0).collect()
        while set(client.addresses) != addresses:  # it looks beside its calls
            await client.complete(token_ids=[1], max_tokens=1)
        # None of the other two gets more than a quarter above its share: the second one has some.
        streams = [stream(number) for number in range(24)]
        for one in streams:
            await anext(one)
        fleet.schedulers[1].kill()
        outputs = [(await one.collect())[0].token_ids for one in streams]
        assert outputs == [alone.token_ids] * len(streams)
        assert sum(one.resumptions for one in streams) > 0


async def test_who_ended_or_drains_is_in_no_directory_soon(fleet: Fleet) -> None:
    first, second, third = (process.address for process in fleet.schedulers)
    async with stub_of(fleet.schedulers[2]) as stub:
        view = View(stub)
        await view.until_serving({first, third})
        assert second not in view.entries
        fleet.schedulers[0].signal(signal.SIGTERM)
        await view.until_serving({third})
