"""The directory of a fleet: who may write what, and what watchers get to know."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.channel import PLAINTEXT
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.credentials import Credentials
from service_kit.identity import Identity
from service_kit.tokens import Entry

from scheduler_service.config import SchedulerSettings
from scheduler_service.directory import directory as entries
from scheduler_service.directory import live
from scheduler_service.directory.codec import add_entry, decode_entry, encoded_listing
from scheduler_service.directory.directory import (
    AddressTakenError,
    Changes,
    Directory,
    DirectoryFullError,
    MovedTooSoonError,
    OldGenerationError,
    Rank,
    TooFarBehindError,
)
from scheduler_service.directory.listing import Listing, Load
from scheduler_service.directory.live import LiveDirectory
from scheduler_service.directory.peers import Peers
from scheduler_service.directory.places import is_here, one_spelling
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.model import ServiceState
from scheduler_service.rpc.directory_calls import ENTRIES_PER_READ, MESSAGE_BYTES, DirectoryCalls, Shown

LISTING = Listing(
    address="10.0.0.1:50051",
    tls_name="",
    model="tiny",
    model_fingerprint=b"print",
    adapters=("sql",),
    state=ServiceState.SERVING,
    load=Load(running=3, waiting=1, seats=8, uncomputed_tokens=70, predicted_wait_ms=5),
    generation=7,
    instance="drawn",
)


WRITER = Identity("writer", "token", directory=True)


def entry_at(address: str) -> pb.SchedulerEntry:
    return pb.SchedulerEntry(address=address, model="m", instance=f"at-{address}", generation=1)


class Caller:
    """As much of a call's context as says where the caller is."""

    def __init__(self, peer: str) -> None:
        self.peer = lambda: peer


def listing(number: int, generation: int = 7) -> Listing:
    return replace(
        LISTING, address=f"10.0.0.{number}:50051", instance=f"drawn {number}", generation=generation
    )


class Watcher:
    """What a client knows that asks for changes now and then."""

    def __init__(self) -> None:
        self.version = 0
        self.known: dict[str, Listing] = {}

    def take(self, changes: Changes) -> None:
        for address in changes.removed:
            self.known.pop(address, None)
        for entry in changes.entries:
            self.known[entry.listing.address] = entry.listing
        self.version = changes.version


RANKS = (Rank.ANNOUNCED, Rank.ANNOUNCED, Rank.CLAIMED, Rank.REACHED)  # of the writers
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)
        ),
        st.tuples(st.just("remove"), st.integers(0, 3)),
        st.tuples(st.just("pass"), st.integers(1, 4)),
        st.tuples(st.just("look"), st.integers(0, 1)),
    ),
    max_size=60,
)


@dataclass
class Written:
    """What the model of the directory has of a writer's entry."""

    number: int  # of the address
    instance: int
    generation: int
    moved_at: float
    end: float


@given(STEPS)
def test_watchers_know_what_the_directory_has_and_nobody_writes_anothers_entry(
    steps: list[tuple[str, int] | tuple[str, int, int, int, int]],
) -> None:
    directory, watchers, now = Directory(), (Watcher(), Watcher()), 0.0
    model: dict[int, Written] = {}  # by writer
    for step in steps:
        match step:
            case ("write", writer, number, instance, generation):
                one = replace(listing(number, generation), instance=f"drawn {instance}")
                rivals = [
                    which
                    for which, other in model.items()
                    if which != writer and (other.number == number or other.instance == instance)
                ]
                own = model.get(writer)
                error: type[Exception] | None = None
                moves = own is not None and own.number != number
                moved_at = now if moves else own.moved_at if own else -math.inf
                if any(RANKS[which] >= RANKS[writer] for which in rivals):
                    error = AddressTakenError
                elif own is not None and generation < own.generation:
                    error = OldGenerationError
                elif own is not None and moves and now - own.moved_at < entries.MOVE_S:
                    error = MovedTooSoonError
                else:
                    for which in rivals:
                        del model[which]
                    model[writer] = Written(number, instance, generation, moved_at, now + 5.0)
                with pytest.raises(error) if error else nullcontext():
                    directory.write(one, f"writer {writer}", RANKS[writer], now, 5.0)
            case ("remove", writer):
                directory.remove(f"writer {writer}")
                model.pop(writer, None)
            case ("pass", seconds):
                now += seconds
                directory.expire(now)
                model = {which: one for which, one in model.items() if one.end > now}
            case ("look", which):
                watchers[which].take(directory.since(watchers[which].version, 2))
        assert {entry.writer: (entry.listing.address, entry.listing.instance) for entry in directory} == {
            f"writer {which}": (listing(one.number).address, f"drawn {one.instance}")
            for which, one in model.items()
        }
        assert [entry.listing.address for entry in directory.listed("", 9)] == sorted(
            entry.listing.address for entry in directory
        )
    for watcher in watchers:
        while watcher.version < directory.version:
            watcher.take(directory.since(watcher.version, 2))
        assert watcher.known == {entry.listing.address: entry.listing for entry in directory}


def test_a_full_directory_takes_no_further_writer_and_a_watcher_far_behind_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entries, "MAX_REMOVED", 1)
    directory = Directory(max_entries=2)
    for number in (1, 2):
        directory.write(listing(number), f"writer {number}", Rank.ANNOUNCED, 0.0, math.inf)
    with pytest.raises(DirectoryFullError):
        directory.write(listing(3), "writer 3", Rank.ANNOUNCED, 0.0, math.inf)
    seen = directory.version
    for number in (1, 2):
        directory.remove(f"writer {number}")
    with pytest.raises(TooFarBehindError):
        directory.since(seen, 9)
    assert directory.listed("", 9) == []


def test_an_entry_is_read_as_it_was_written() -> None:
    directory = Directory()
    directory.write(LISTING, "a team", Rank.ANNOUNCED, 10.0, 5.0)
    [entry] = directory
    response = pb.WatchSchedulersResponse()
    add_entry(response, entry, 11.0)
    add_entry(response, entry, 12.5)
    message = response.entries[1]
    assert (message.written_by, message.age_ms) == ("a team", 2500)
    assert decode_entry(message) == LISTING


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", ""),
        ("address", "no-port"),
        ("address", "host:0"),
        ("address", "host:99999"),
        ("address", "host:٣"),
        ("address", "0.0.0.0:1"),
        ("address", "ipv4:127.0.0.1:1"),
        ("address", ":50051"),
        ("address", "a" * 512 + ":1"),
        ("address", "two words:1"),
        ("address", "\x1b]0;x\x07:1"),
        ("tls_name", "x" * 257),
        ("model", "x" * 1025),
        ("instance", ""),
        ("model_fingerprint", b"x" * 257),
        ("adapters", ["a"] * 1025),
        ("adapters", ["a" * 128] * 257),
        ("adapters", [""]),
        ("generation", 0),
    ],
)
def test_an_entry_that_is_malformed_is_refused_by_field(field: str, value: object) -> None:
    good = {
        "address": "host:1", "model": "m", "instance": "i", "generation": 1,
    }  # fmt: skip
    with pytest.raises(ServiceError) as caught:
        decode_entry(pb.SchedulerEntry(**(good | {field: value})))  # type: ignore[arg-type]
    assert caught.value.reason is ErrorReason.INVALID_REQUEST
    assert caught.value.field == f"entry.{field}"


def test_a_state_that_is_not_known_here_is_none_that_gets_new_streams() -> None:
    entry = pb.SchedulerEntry(address="host:1", instance="i", generation=1)
    entry.MergeFromString(b"\x30\x63")  # state 99
    assert decode_entry(entry).state is ServiceState.NO_EXECUTOR


@pytest.mark.parametrize(
    ("given", "known", "here"),
    [
        ("10.0.0.1:050051", "10.0.0.1:50051", False),
        ("Host.Example.:1", "host.example:1", False),
        ("[2001:DB8:0::1]:1", "[2001:db8::1]:1", False),
        ("LocalHost:02", "localhost:2", True),
        ("a.localhost:1", "a.localhost:1", True),
        ("[0:0::1]:1", "[::1]:1", True),
        ("[::ffff:127.0.0.1]:1", "127.0.0.1:1", True),
        ("[::ffff:7f00:1]:1", "127.0.0.1:1", True),
    ],
)
def test_an_address_has_one_spelling_and_loopback_is_known_in_each(
    given: str, known: str, here: bool
) -> None:
    assert decode_entry(entry_at(given)).address == known
    assert is_here(given) is here
    assert one_spelling(known) == known


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "[::]",
        "[::ffff:0.0.0.0]",
        "0.0.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "[ff02::1]",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "1.2.3.4.5",
        "[fe80::1%eth0]",
        "%31.0.0.1",
        "bücher.example",
        "a..b",
        "-a",
        "unix:/run/x",
        "dns:///host",
        "user@host",
        "host/path",
        "::1",
    ],
)
def test_what_leads_to_no_one_host_or_has_several_readings_is_no_address(host: str) -> None:
    with pytest.raises(ServiceError, match=r"entry\.address"):
        decode_entry(entry_at(f"{host}:50051"))
    with pytest.raises(ValueError, match="advertise"):
        SchedulerSettings(executor=("127.0.0.1:1",), advertise=f"{host}:50051")


def test_a_peer_elsewhere_and_a_caller_elsewhere_name_no_loopback_address() -> None:
    directory = LiveDirectory(lambda: LISTING)
    directory.refresh()
    here = entry_at("[::ffff:127.0.0.1]:1")
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


def entry_of(one: Listing) -> entries.Entry:
    return entries.Entry(one, "a team", Rank.ANNOUNCED, 0.0, 0.0, math.inf, 1)


def test_nobody_writes_the_schedulers_own_address_or_instance() -> None:
    directory = LiveDirectory(lambda: LISTING)
    for forged in (replace(LISTING, instance="a forger's"), replace(LISTING, address="10.0.0.2:1")):
        with pytest.raises(ServiceError) as caught:
            directory.write(forged, "a forger", Rank.REACHED, 30.0)
        assert caught.value.reason is ErrorReason.ADDRESS_TAKEN


def test_a_peers_claim_of_another_address_gives_way_to_an_announcer_and_its_own_address_does_not() -> None:
    directory = LiveDirectory(lambda: LISTING)
    follow = Peers((), PLAINTEXT, directory)

    def says(peer: str, address: str, instance: str) -> None:
        one = pb.SchedulerEntry(address=address, instance=instance, generation=1)
        follow._learn(pb.WatchSchedulersResponse(entries=[one]), peer)

    def writers() -> dict[str, str]:
        return {entry.listing.address: entry.writer for entry in directory.listed("", 99) if entry.writer}

    def announce(who: str, address: str, instance: str) -> bool:
        one = replace(LISTING, address=address, instance=instance)
        try:
            directory.write(one, who, Rank.ANNOUNCED, 30.0)
        except ServiceError as error:
            return error.reason is not ErrorReason.ADDRESS_TAKEN
        return True

    says("10.0.0.2:1", "10.0.0.3:1", "two")
    assert announce("actor", "10.0.0.3:1", "three")
    assert writers() == {"10.0.0.3:1": "actor"}
    with pytest.raises(ServiceError, match="another entry"):
        says("10.0.0.2:1", "10.0.0.3:1", "two")
    assert not announce("other", "10.0.0.4:1", "three")  # a copied instance
    # What answers at an address speaks for it, whoever was there first.
    assert announce("other", "10.0.0.5:1", "two")
    says("10.0.0.2:1", "10.0.0.2:1", "two")
    assert writers() == {"10.0.0.3:1": "actor", "10.0.0.2:1": "peer 10.0.0.2:1"}
    assert not announce("other", "10.0.0.2:1", "five")
    # After a name that leads to several schedulers, an older one may follow.
    says("balancer:1", "10.0.0.6:1", "six")
    says("balancer:1", "10.0.0.7:1", "seven")
    assert writers()["10.0.0.7:1"] == "peer balancer:1"
    assert "10.0.0.6:1" not in writers()


def test_a_writer_that_moves_its_entry_all_the_time_is_refused() -> None:
    now = [0.0]
    directory = LiveDirectory(lambda: LISTING, lambda: now[0])
    for number in (2, 3):
        directory.write(listing(number), "a flooder", Rank.ANNOUNCED, 30.0)
    with pytest.raises(ServiceError) as caught:
        directory.write(listing(4), "a flooder", Rank.ANNOUNCED, 30.0)
    assert (caught.value.reason, caught.value.retry_after_s) == (ErrorReason.QUOTA, entries.MOVE_S)
    directory.write(listing(3), "a flooder", Rank.ANNOUNCED, 30.0)
    now[0] += entries.MOVE_S
    directory.write(listing(4), "a flooder", Rank.ANNOUNCED, 30.0)


def test_watchers_are_bounded_in_all_and_for_one_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 3)
    monkeypatch.setattr(live, "MAX_WATCHERS_PER_IDENTITY", 2)
    directory = LiveDirectory(lambda: LISTING)

    def refused(identity: str) -> bool:
        try:
            with directory.watching(identity):
                return False
        except ServiceError as error:
            return error.reason is ErrorReason.WATCHERS

    with directory.watching("a"), directory.watching("a"):
        assert refused("a")
        assert not refused("b")
        with directory.watching("b"):
            assert refused("c")
    assert not refused("a")
    assert directory.pause_s == live.PAUSE_S


def test_all_watchers_together_are_sent_a_bounded_number_of_entries() -> None:
    directory = LiveDirectory(lambda: LISTING)
    for number in range(200):
        one = replace(LISTING, address=f"h{number}:1", instance=f"i{number}")
        directory.write(one, f"w{number}", Rank.ANNOUNCED, 30.0)
    assert directory.pause_s == 201 / live.ENTRIES_PER_S
    with ExitStack() as watchers:
        for _ in range(1000):
            watchers.enter_context(directory.watching("a"))
        assert directory.pause_s == 201 * 1000 / live.ALL_ENTRIES_PER_S


async def test_a_watcher_is_woken_by_a_change_and_the_own_entry_is_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "PAUSE_S", 0.0)
    now = [100.0]
    shown = [LISTING]
    directory = LiveDirectory(lambda: shown[0], lambda: now[0])
    directory.refresh()
    seen = directory.version
    waiting = asyncio.create_task(directory.changed(seen))
    await asyncio.sleep(0)
    directory.refresh()  # nothing has changed
    await asyncio.sleep(0)
    assert not waiting.done()
    shown[0] = replace(LISTING, state=ServiceState.DRAINING)
    directory.refresh()
    await waiting
    assert [entry.listing.state for entry in directory.since(seen, 9).entries] == [ServiceState.DRAINING]
    seen = directory.version
    now[0] += live.RENEWAL_S
    directory.refresh()
    assert directory.version == seen + 1
