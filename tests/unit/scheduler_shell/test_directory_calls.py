"""What calls are sent of the directory: by where the caller is, in parts, in small messages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import pytest
from paceline.channel import PLAINTEXT
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.credentials import Credentials
from service_kit.identity import Identity
from service_kit.token_file import Entry

from scheduler_service.directory import directory as entries
from scheduler_service.directory import live
from scheduler_service.directory.codec import decode_entry, encoded_listing
from scheduler_service.directory.directory import (
    Directory,
    Rank,
)
from scheduler_service.directory.listing import Listing
from scheduler_service.directory.live import LiveDirectory
from scheduler_service.directory.peers import Peers
from scheduler_service.errors import ServiceError
from scheduler_service.model import ServiceState
from scheduler_service.rpc.directory_calls import ENTRIES_PER_READ, MESSAGE_BYTES, DirectoryCalls, Shown
from tests.unit.scheduler_shell.listings import LISTING, listing

WRITER = Identity("writer", "token", directory=True)


class Caller:
    """As much of a call's context as says where the caller is."""

    def __init__(self, peer: str) -> None:
        self.peer = lambda: peer


def test_a_peer_elsewhere_and_a_caller_elsewhere_name_no_loopback_address() -> None:
    directory = LiveDirectory(lambda: LISTING)
    directory.refresh()
    here = pb.SchedulerEntry(address="[::ffff:127.0.0.1]:1", model="m", instance="near", generation=1)
    message = pb.WatchSchedulersResponse(entries=[here])
    for peer in ("10.0.0.9:1", "host.example:1", "ipv4:10.0.0.9:1"):
        with pytest.raises(ServiceError, match="loopback"):
            Peers((), PLAINTEXT, directory)._learn(message, peer)
    assert Peers((), PLAINTEXT, directory)._learn(message, "unix:/run/x")

    calls = DirectoryCalls(directory, Credentials(fixed=[Entry.of("t", WRITER)]))
    assert calls._credentials.admits((("authorization", "Bearer t"),))
    request = pb.AnnounceSchedulerRequest(entry=here)
    with pytest.raises(ServiceError, match="loopback"):
        calls.announce(request, cast("Any", Caller("ipv4:10.0.0.9:1")))


def test_who_is_elsewhere_sees_no_loopback_addresses() -> None:
    directory = Directory()
    near = replace(listing(1), address="127.0.0.1:1")
    directory.write(near, live.OWN, Rank.OWN, 0.0, math.inf)
    directory.write(listing(2), "another", Rank.ANNOUNCED, 0.0, math.inf)

    def seen(*, near: bool) -> tuple[list[str], list[str]]:
        removed = ("127.0.0.1:2", "10.0.0.9:1")
        messages = list(Shown(near=near).messages(directory, removed, complete=True))
        assert [message.complete for message in messages] == [False] * (len(messages) - 1) + [True]
        return (
            [entry.address for message in messages for entry in message.entries],
            [address for message in messages for address in message.removed],
        )

    assert seen(near=True) == (["127.0.0.1:1", "10.0.0.2:50051"], ["127.0.0.1:2", "10.0.0.9:1"])
    assert seen(near=False) == (["10.0.0.2:50051"], ["10.0.0.9:1"])


async def answers(
    directory: LiveDirectory, peer: str, *, own: bool = False
) -> AsyncGenerator[pb.WatchSchedulersResponse]:
    """What a watcher is sent who reads one message after the other."""
    sent: asyncio.Queue[pb.WatchSchedulersResponse] = asyncio.Queue(1)
    context = cast("Any", Caller(peer))
    context.write = sent.put
    calls = DirectoryCalls(directory, Credentials())
    task = asyncio.create_task(calls.watch(pb.WatchSchedulersRequest(own=own), context))
    try:
        while True:
            yield await sent.get()
    finally:
        task.cancel()


async def test_who_asks_for_the_own_entry_waits_for_no_others_and_sees_none_of_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "PAUSE_S", 0.0)
    monkeypatch.setattr(live, "ENTRIES_PER_S", 1e-9)
    shown = [replace(LISTING, address="127.0.0.1:1")]
    directory = LiveDirectory(lambda: shown[0])
    directory.write(listing(2), "another", Rank.ANNOUNCED, 30.0)
    near, far = answers(directory, "unix:", own=True), answers(directory, "ipv4:10.0.0.8:1", own=True)
    assert await anext(far) == pb.WatchSchedulersResponse(complete=True)
    assert [entry.address for entry in (await anext(near)).entries] == ["127.0.0.1:1"]
    shown[0] = replace(shown[0], state=ServiceState.DRAINING)
    directory.refresh()
    message = await anext(near)
    assert [entry.state for entry in message.entries] == [pb.SCHEDULER_STATE_DRAINING]
    for watcher in (near, far):
        await watcher.aclose()


async def test_a_large_directory_comes_in_parts_whatever_changes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "PAUSE_S", 0.0)
    for rate in ("ENTRIES_PER_S", "ALL_ENTRIES_PER_S"):
        monkeypatch.setattr(live, rate, math.inf)
    directory, known = LiveDirectory(lambda: LISTING), dict[str, str]()

    def write(number: int, instance: str = "") -> None:
        one = replace(LISTING, address=f"h{number}:1", instance=instance or f"i{number}")
        directory.write(one, f"w{number}", Rank.ANNOUNCED, 30.0)

    for number in range(2 * ENTRIES_PER_READ):
        write(number)
    watcher, sizes = answers(directory, "unix:"), []
    async for message in watcher:
        sizes.append(len(message.entries))
        known |= {entry.address: entry.instance for entry in message.entries}
        if len(sizes) == 1:  # another part is written already, and the third is not
            write(0, "of a later start")
            write(999)
            directory.remove("w1")
        for address in message.removed:
            del known[address]
        if known.get("h0:1") == "of a later start" and len(known) == 2 * ENTRIES_PER_READ + 1:
            break
    await watcher.aclose()
    assert sizes[:2] == [ENTRIES_PER_READ, ENTRIES_PER_READ]
    assert known.keys() == {LISTING.address, *(f"h{number}:1" for number in (0, *range(2, 256), 999))}


def entry_of(one: Listing) -> entries.Entry:
    return entries.Entry(one, "a team", Rank.ANNOUNCED, 0.0, 0.0, math.inf, 1)


def test_messages_of_entries_as_large_as_may_be_stay_small() -> None:
    adapters = tuple(f"{number:0>127}" for number in range(3000))
    largest = replace(
        LISTING, model="m " * 2000, model_fingerprint=b"f" * 256, adapters=adapters, instance="i" * 256
    ).bounded()
    assert largest.adapters == adapters[:258]
    assert decode_entry(encoded_listing(largest)) == largest
    names = tuple(f"{number:0>30}" for number in range(3000))
    assert len(replace(LISTING, adapters=names).bounded().adapters) == 1024
    messages = list(Shown(near=True).messages([entry_of(largest)] * ENTRIES_PER_READ, complete=True))
    assert max(message.ByteSize() for message in messages) < MESSAGE_BYTES
    assert sum(len(message.entries) for message in messages) == ENTRIES_PER_READ
