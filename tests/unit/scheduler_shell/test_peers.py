"""A scheduler and what its peers say: nothing of it ends the scheduler, or is believed of another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from paceline.channel import PLAINTEXT, Security
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.directory import peers
from scheduler_service.directory.listing import Listing, Load
from scheduler_service.directory.live import LiveDirectory
from scheduler_service.directory.peers import Peers
from scheduler_service.model import ServiceState

OWN = Listing("10.0.0.9:50051", "", "m", b"f", (), ServiceState.SERVING, Load(), 1, "this-one")
GOOD = pb.WatchSchedulersResponse(
    entries=[pb.SchedulerEntry(address="127.0.0.1:7", model="m", instance="another", generation=1)],
    complete=True,
)
ITSELF = pb.WatchSchedulersResponse(entries=[pb.SchedulerEntry(address="127.0.0.1:7", instance="this-one")])
ITSELF.entries[0].generation = 1


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_WAIT_S", "MAX_WAIT_S", "READ_PAUSE_S", "ITSELF_WAIT_S"):
        monkeypatch.setattr(peers, name, 0.01)


class Peer:
    """A server whose calls of WatchSchedulers are answered by `answers`, one a call, the last one again."""

    def __init__(self, *answers: Callable[[Any], Any]) -> None:
        self.answers, self.calls, self.address = list(answers), 0, ""
        self._server = grpc.aio.server()

    async def __aenter__(self) -> Peer:
        handler: Any = grpc.unary_stream_rpc_method_handler(
            self._answer, response_serializer=lambda data: data
        )
        generic = grpc.method_handlers_generic_handler(
            "paceline.scheduler.v1.SchedulerService", {"WatchSchedulers": handler}
        )
        self._server.add_generic_rpc_handlers((generic,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def _answer(self, request: bytes, context: Any) -> None:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        await answer(context)


def sends(*messages: bytes | pb.WatchSchedulersResponse, stays: bool = False) -> Callable[[Any], Any]:
    async def answer(context: Any) -> None:
        for message in messages:
            await context.write(message if isinstance(message, bytes) else message.SerializeToString())
        if stays:
            await asyncio.Event().wait()

    return answer


def ends(code: grpc.StatusCode) -> Callable[[Any], Any]:
    return lambda context: context.abort(code, "so")


@asynccontextmanager
async def following(address: str, security: Security = PLAINTEXT) -> AsyncIterator[LiveDirectory]:
    """The directory of a scheduler that follows a peer, whose task must go on until the end."""
    directory = LiveDirectory(lambda: OWN)
    directory.refresh()
    task = asyncio.create_task(Peers((address,), security, directory).run())
    try:
        async with asyncio.timeout(20):
            yield directory
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    for _ in iter(condition, True):
        await asyncio.sleep(0.005)


def addresses(directory: LiveDirectory) -> set[str]:
    return {entry.listing.address for entry in directory.listed("", 9)}


@pytest.mark.parametrize(
    "lie",
    [
        sends(b"\xff\xff"),
        sends(b"\x0a\x03\x0a\x01\xff"),  # no UTF-8
        sends(pb.WatchSchedulersResponse(entries=[pb.SchedulerEntry(address="0.0.0.0:1")])),
        sends(pb.WatchSchedulersResponse(complete=True)),
        sends(),
        ends(grpc.StatusCode.CANCELLED),
        ends(grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_a_peer_that_lies_is_absent_and_asked_again(
    lie: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "scheduler_service")
    async with (
        Peer(lie, lie, lie, sends(GOOD, stays=True)) as peer,
        following(peer.address) as directory,
    ):
        await until(lambda: peer.calls == 3)
        assert addresses(directory) == {OWN.address}
        await until(lambda: "127.0.0.1:7" in addresses(directory))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["a peer's entry can't be had", "a peer's entry is there again"]


async def test_an_authority_that_is_missing_leaves_its_peers_out_until_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following("127.0.0.1:7", Security(ca_file=tmp_path / "ca.pem")) as directory:
        await until(lambda: bool(caplog.records))
        await asyncio.sleep(0.1)  # several attempts
        assert addresses(directory) == {OWN.address}
    assert len(caplog.records) == 1


async def test_a_name_that_led_to_this_scheduler_is_asked_again() -> None:
    async with (
        Peer(sends(ITSELF), sends(ITSELF), sends(GOOD, stays=True)) as peer,
        following(peer.address) as directory,
    ):
        await until(lambda: "127.0.0.1:7" in addresses(directory))


async def test_a_peer_that_says_nothing_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEER_TTL_S", 0.2)
    async with (
        Peer(sends(stays=True), sends(GOOD, stays=True)) as peer,
        following(peer.address) as directory,
    ):
        await until(lambda: "127.0.0.1:7" in addresses(directory))


async def test_a_peer_that_ends_each_call_is_asked_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "MIN_WAIT_S", 0.02)
    monkeypatch.setattr(peers, "MAX_WAIT_S", 3600.0)
    began = time.monotonic()
    async with Peer(sends(GOOD)) as peer, following(peer.address):
        await until(lambda: peer.calls == 5)
    assert time.monotonic() - began > 0.02 + 0.04 + 0.08 + 0.16


async def test_a_peer_that_sends_without_end_is_read_at_a_bounded_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "READ_PAUSE_S", 3600.0)
    other = replace_address(GOOD, "127.0.0.1:8")
    async with Peer(sends(GOOD, *[other] * 1000)) as peer, following(peer.address) as directory:
        await until(lambda: "127.0.0.1:7" in addresses(directory))
        await asyncio.sleep(0.1)
        assert addresses(directory) == {OWN.address, "127.0.0.1:7"}


def replace_address(message: pb.WatchSchedulersResponse, address: str) -> pb.WatchSchedulersResponse:
    changed = pb.WatchSchedulersResponse()
    changed.CopyFrom(message)
    changed.entries[0].address = address
    return changed
