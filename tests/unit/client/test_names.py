"""A DNS name of several addresses is several schedulers. A server of names in this process tells them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import paceline
import pytest
from google.rpc import code_pb2
from paceline import aio, channel, errors
from paceline.channel import Link, server_options
from paceline.failover import MAX_TRIES_OF_A_NAME
from paceline.names import ROUND_ROBIN, dns_name, schedulers_behind
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1 import scheduler_pb2_grpc
from paceline.types import Completion

from tests.support.checkout import ROOT
from tests.support.name_server import NameServer
from tests.unit.client.ideal_scheduler import ids_of
from tests.unit.client.test_several_schedulers import SEED, Fake, broken, status

NAME = "schedulers.test"
SERVICE = pb.DESCRIPTOR.services_by_name["SchedulerService"]
HOSTS = ("127.0.0.2", "127.0.0.3")
DRAINING = (0, status(code_pb2.UNAVAILABLE, "DRAINING", 1.0))
PINGS = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
FULL = (0, status(code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", 1.0))


@dataclass
class Caller:
    """One client's calls, whichever of both clients it is."""

    complete: Callable[[], Awaitable[Any]]
    stream: Callable[[], Awaitable[list[Completion]]]


@asynccontextmanager
async def blocking(address: str) -> AsyncIterator[Caller]:
    with paceline.Client(address) as client:
        yield Caller(
            lambda: asyncio.to_thread(lambda: client.complete("x", seed=SEED)),
            lambda: asyncio.to_thread(lambda: client.generate("x", seed=SEED).collect()),
        )


@asynccontextmanager
async def asynchronous(address: str) -> AsyncIterator[Caller]:
    async with aio.Client(address) as client:
        yield Caller(
            lambda: client.complete("x", seed=SEED), lambda: client.generate("x", seed=SEED).collect()
        )


Open = Callable[[str], AbstractAsyncContextManager[Caller]]
both = pytest.mark.parametrize("opened", [blocking, asynchronous])


async def start(fake: Fake, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=server_options(Link.PUBLIC))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, server)
    port = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return server, port


@dataclass
class Schedulers:
    """Schedulers of one port, each with an address of its own; `address` is their name's."""

    names: NameServer
    fakes: list[Fake]
    servers: list[grpc.aio.Server]
    port: int

    @property
    def address(self) -> str:
        return self.names.target(NAME, self.port)

    async def reach_all(self, caller: Caller) -> None:
        """Call until the client is connected to all, and forget these calls."""
        while not all(fake.requests for fake in self.fakes):
            await caller.complete()
        for fake in self.fakes:
            fake.requests.clear()

    @property
    def calls(self) -> list[int]:
        return [len(fake.requests) for fake in self.fakes]


@pytest.fixture
async def schedulers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Schedulers]:
    def resolve(name: str, *_: object, **__: object) -> list[Any]:
        assert name == NAME
        found = names.addresses[NAME]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in found]

    monkeypatch.setattr("paceline.names.socket.getaddrinfo", resolve)
    # A machine that stands still must not cost a connection: these tests count calls.
    patient = [one for one in channel.channel_options(Link.PUBLIC) if one[0] not in PINGS]
    monkeypatch.setattr(channel, "channel_options", lambda link: list(patient))
    with NameServer.running() as names:
        names.addresses = {NAME: HOSTS}
        fakes = [Fake() for _ in HOSTS]
        first, port = await start(fakes[0], HOSTS[0], 0)
        second, _ = await start(fakes[1], HOSTS[1], port)
        running = Schedulers(names, fakes, [first, second], port)
        try:
            yield running
        finally:
            for server in running.servers:
                await server.stop(None)


@both
async def test_calls_are_spread_over_all_addresses_of_a_name(schedulers: Schedulers, opened: Open) -> None:
    async with opened(schedulers.address) as caller:
        await schedulers.reach_all(caller)
        for _ in range(6):
            await caller.complete()
    assert schedulers.calls == [3, 3]


@both
@pytest.mark.parametrize("refusal", [DRAINING, FULL])
async def test_what_one_scheduler_of_a_name_refuses_is_taken_by_another(
    schedulers: Schedulers, opened: Open, refusal: Any
) -> None:
    async with opened(schedulers.address) as caller:
        await schedulers.reach_all(caller)
        schedulers.fakes[0].script = [refusal] * 20
        for _ in range(6):
            assert list((await caller.complete()).token_ids) == ids_of(SEED, 0, 10)
            assert list((await caller.stream())[0].token_ids) == ids_of(SEED, 0, 10)
    assert schedulers.calls[0] > 0


@both
@pytest.mark.parametrize(("refusal", "tries"), [(DRAINING, MAX_TRIES_OF_A_NAME), (FULL, 2)])
async def test_what_all_schedulers_of_a_name_refuse_is_refused_after_a_bounded_number_of_tries(
    schedulers: Schedulers, opened: Open, refusal: Any, tries: int
) -> None:
    async with opened(schedulers.address) as caller:
        await schedulers.reach_all(caller)
        for fake in schedulers.fakes:
            fake.script = [refusal] * 20
        with pytest.raises(errors.RetryLater) as caught:
            await caller.complete()
    assert caught.value.retry_after_s == 1.0
    assert sum(schedulers.calls) == tries


@both
async def test_a_stream_whose_scheduler_dies_goes_on_at_another_address_of_its_name(
    schedulers: Schedulers, opened: Open
) -> None:
    async with opened(schedulers.address) as caller:
        await schedulers.reach_all(caller)
        for fake in schedulers.fakes:
            fake.script = [(2, broken)]
        assert list((await caller.stream())[0].token_ids) == ids_of(SEED, 0, 10)
    assert min(schedulers.calls) > 0


@both
async def test_calls_go_on_when_a_scheduler_of_the_name_is_gone(schedulers: Schedulers, opened: Open) -> None:
    async with opened(schedulers.address) as caller:
        await schedulers.reach_all(caller)
        await schedulers.servers[0].stop(None)
        for _ in range(6):
            await caller.complete()
        await schedulers.servers[1].stop(None)
        with pytest.raises(errors.Unavailable):
            await caller.complete()


@both
async def test_a_scheduler_that_is_added_to_a_name_gets_calls_of_the_clients_that_are_there(
    schedulers: Schedulers, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_AGE_MS", 100)  # of connections to the one that is added last
    often = ("grpc.dns_min_time_between_resolutions_ms", 50)
    monkeypatch.setattr(channel, "ROUND_ROBIN", (ROUND_ROBIN[0], often))
    aging, _ = await start(Fake(), "127.0.0.4", schedulers.port)
    schedulers.servers.append(aging)
    schedulers.names.addresses = {NAME: ["127.0.0.4"]}
    async with opened(schedulers.address) as caller:
        await caller.complete()
        schedulers.names.addresses = {NAME: ["127.0.0.4", *HOSTS]}
        await schedulers.reach_all(caller)


async def test_the_service_config_of_the_page_spreads_calls_and_tries_again_what_one_refuses(
    schedulers: Schedulers,
) -> None:
    """For clients in other languages, without the SDK."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    (config,) = re.findall(r"^```json\n(.*?)^```$", page, re.M | re.S)
    (method,) = json.loads(config)["methodConfig"]
    assert [name["service"] for name in method["name"]] == [SERVICE.full_name]
    options = [("grpc.service_config", config)]
    async with grpc.aio.insecure_channel(schedulers.address, options) as plain:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(plain)
        request = pb.GenerateUnaryRequest(
            request=pb.GenerateRequest(text="x", sampling=pb.SamplingParams(seed=SEED))
        )

        async def complete() -> list[Completion]:
            await stub.GenerateUnary(request, timeout=60)
            return []

        await schedulers.reach_all(Caller(complete, complete))
        schedulers.fakes[0].script = [DRAINING] * 20
        for _ in range(4):
            await complete()
    assert schedulers.calls[0] > 0
    assert schedulers.calls[1] == 4


NO_NAMES = (
    "127.0.0.1:50051",
    "[::1]:50051",
    "::1",
    "localhost:50051",
    "unix:/run/socket",
    "unix:name.socket",
    "ipv4:10.0.0.1:1",
    "dns:///10.0.0.1:1",
)
NAMES = (
    "llm.example:50051",
    "llm.example",
    "dns:llm.example:50051",
    "dns:///llm.example:50051",
    "dns://10.0.0.1:53/llm.example:50051",
)


@pytest.mark.parametrize("address", NO_NAMES)
def test_addresses_sockets_and_localhost_are_no_names_of_several_schedulers(address: str) -> None:
    assert dns_name(address) is None
    assert schedulers_behind(address) == 1


@pytest.mark.parametrize("address", NAMES)
def test_a_name_is_found_in_each_form_of_an_address(address: str) -> None:
    assert dns_name(address) == "llm.example"


@pytest.mark.parametrize("address", ["http://llm.example:50051", "https://127.0.0.1", "grpc+tls://[::1]:1"])
def test_a_url_is_refused_with_what_to_give_instead(address: str) -> None:
    with pytest.raises(ValueError, match=r"give host:port without [a-z+]+://"):
        paceline.Client(address)


def test_addresses_of_both_ip_versions_are_those_of_the_same_schedulers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [("10.0.0.1", 0), ("10.0.0.2", 0), ("10.0.0.2", 0), ("fd00::1", 0, 0, 0)]

    def resolve(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET6 if ":" in str(one[0]) else socket.AF_INET, 1, 6, "", one) for one in found]

    monkeypatch.setattr("paceline.names.socket.getaddrinfo", resolve)
    assert schedulers_behind("llm.example:50051") == 2


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label")])
def test_a_name_that_does_not_resolve_counts_as_one(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def resolve(*_: object, **__: object) -> list[Any]:
        raise error

    monkeypatch.setattr("paceline.names.socket.getaddrinfo", resolve)
    assert schedulers_behind("llm.example:50051") == 1


@pytest.mark.parametrize("link", list(Link))
def test_only_connections_to_schedulers_are_spread_over_a_name(link: Link) -> None:
    spread = channel._options("llm.example:1", link, channel.PLAINTEXT)
    assert (ROUND_ROBIN[0] in spread) == (link is Link.PUBLIC)
    assert ROUND_ROBIN[0] not in channel._options("127.0.0.1:1", link, channel.PLAINTEXT)


@pytest.mark.parametrize("address", ["localhost", "llm.example", "10.0.0.1", "[::1]"])
def test_a_host_without_a_port_is_refused_before_grpc_calls_port_443(address: str) -> None:
    for client in (paceline.Client, paceline.ExecutorClient):
        with pytest.raises(ValueError, match="its port is missing"):
            client(address)


@pytest.mark.parametrize("address", ["50171", ":50171"])
def test_a_port_without_a_host_is_refused_with_the_one_that_is_meant(address: str) -> None:
    with pytest.raises(ValueError, match=r"its host is missing, as in 127\.0\.0\.1:50171$"):
        paceline.Client(address)


def test_a_name_without_a_port_that_is_written_out_keeps_grpcs_own_port() -> None:
    with paceline.Client("dns:///llm.example") as client:
        assert client.addresses == ("dns:///llm.example",)
