"""The directory of a fleet: who may write what, and what watchers get to know."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.channel import PLAINTEXT
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.directory import directory as entries
from scheduler_service.directory import live
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
from scheduler_service.directory.listing import Listing
from scheduler_service.directory.live import LiveDirectory
from scheduler_service.directory.peers import Peers
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.model import ServiceState
from tests.unit.scheduler_shell.listings import LISTING, listing


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
