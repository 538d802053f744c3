"""The directory's entries: who may write which, when they go, what has changed. Pure: time is passed in."""

from __future__ import annotations

import enum
import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from scheduler_service.directory.listing import Listing

MAX_ENTRIES = 10_000
MAX_REMOVED = 4096
"""Addresses of removed entries that are remembered for watchers."""
MOVE_S = 5.0
"""Time between two changes of an entry's address: each is a removal, of which MAX_REMOVED are remembered."""


class Rank(enum.IntEnum):
    """Whose word counts where two writers' entries have one address or one instance: the higher one's."""

    CLAIMED = enum.auto()  # a peer's, of another address than that at which it answers
    ANNOUNCED = enum.auto()  # of somebody with the right to write into the directory
    REACHED = enum.auto()  # a peer's, of the address at which it answers
    OWN = enum.auto()  # this scheduler's


class AddressTakenError(Exception):
    """Another writer's entry has the address, or the instance, and no lower rank."""


class MovedTooSoonError(Exception):
    """The writer's entry has changed its address a moment ago: see MOVE_S."""


class OldGenerationError(Exception):
    """The entry has a higher generation."""


class DirectoryFullError(Exception):
    """There is no room for a further entry."""


class TooFarBehindError(Exception):
    """A watcher missed more removals than are remembered: it has to begin anew."""


@dataclass(slots=True)
class Entry:
    """A listing with the writer's identity ("": this scheduler) and times in seconds."""

    listing: Listing
    writer: str
    rank: Rank
    written_at: float
    moved_at: float  # when its address changed last
    expires_at: float
    version: int  # of the directory, when the entry was written last
    encoded: Any = None  # its message, once a watcher was sent it


@dataclass(frozen=True, slots=True)
class Changes:
    """What has happened in the directory up to `version`."""

    entries: tuple[Entry, ...]  # new or changed ones, in the order in which they were written last
    removed: tuple[str, ...]  # addresses
    version: int


class Directory:
    """Entries by address. A writer has at most one; no two have one address or one instance.

    Of two writers the one of the higher rank has its entry, and otherwise the one that wrote first.

    `version` rises with each change. A watcher reads what is `listed`, part by part, then what changed
    `since` the version at which it began: it holds its place alone, not the entries that it has not read.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.version = 0
        self._max_entries = max_entries
        self._entries: dict[str, Entry] = {}  # by address
        self._log: list[tuple[int, str]] = []  # versions and what changed, with outdated changes between
        self._addresses: dict[str, str] = {}  # by writer
        self._instances: dict[str, str] = {}  # addresses by instance
        self._sorted: list[str] = []  # addresses
        self._removed: OrderedDict[str, int] = OrderedDict()  # address: version of its removal
        self._forgotten = 0  # version of the last removal that is remembered no more

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def of(self, writer: str) -> Entry | None:
        """The writer's entry."""
        address = self._addresses.get(writer)
        return None if address is None else self._entries[address]

    def write(self, listing: Listing, writer: str, rank: Rank, now: float, ttl_s: float) -> None:
        """Write the writer's entry, in place of the one that it has, and of those of lower rank in its way.

        Raises AddressTakenError, OldGenerationError, MovedTooSoonError or DirectoryFullError; then nothing
        has changed.
        """
        found = (self._entries.get(listing.address), self._of_instance(listing.instance))
        rivals = {old.writer: old for old in found if old is not None and old.writer != writer}
        if any(old.rank >= rank for old in rivals.values()):
            raise AddressTakenError
        own, moved_at = self.of(writer), -math.inf
        if own is not None:
            moves, moved_at = own.listing.address != listing.address, own.moved_at
            if listing.generation < own.listing.generation:
                raise OldGenerationError(str(own.listing.generation))
            if moves and now - moved_at < MOVE_S:
                raise MovedTooSoonError
            if moves:
                moved_at = now
        elif len(self._entries) - len(rivals) >= self._max_entries and rank is not Rank.OWN:
            raise DirectoryFullError(str(self._max_entries))
        for old in rivals.values():
            self._remove(old)
        if own is not None and own.listing.address != listing.address:
            self._remove(own)
        elif own is not None:
            del self._instances[own.listing.instance]
        version = self._logged(listing.address)
        entry = Entry(listing, writer, rank, now, moved_at, now + ttl_s, version)
        if listing.address not in self._entries:
            insort(self._sorted, listing.address)
        self._entries[listing.address] = entry
        self._addresses[writer] = self._instances[listing.instance] = listing.address
        self._removed.pop(listing.address, None)

    def _of_instance(self, instance: str) -> Entry | None:
        address = self._instances.get(instance)
        return None if address is None else self._entries[address]

    def remove(self, writer: str) -> None:
        """Remove the writer's entry, if it has one."""
        if (entry := self.of(writer)) is not None:
            self._remove(entry)

    def expire(self, now: float) -> None:
        """Remove the entries whose time is over."""
        for entry in [entry for entry in self._entries.values() if entry.expires_at <= now]:
            self._remove(entry)

    def listed(self, after: str, limit: int) -> list[Entry]:
        """At most `limit` entries, by address, from the first one after `after`."""
        first = bisect_right(self._sorted, after)
        return [self._entries[address] for address in self._sorted[first : first + limit]]

    def since(self, version: int, limit: int) -> Changes:
        """The oldest changes after `version`, at most `limit`. Raises TooFarBehindError."""
        if version < self._forgotten:
            raise TooFarBehindError
        entries: list[Entry] = []
        removed: list[str] = []
        for at in range(bisect_right(self._log, version, key=itemgetter(0)), len(self._log)):
            if len(entries) + len(removed) == limit:
                return Changes(tuple(entries), tuple(removed), self._log[at][0] - 1)
            changed, address = self._log[at]
            entry = self._entries.get(address)
            if entry is not None and entry.version == changed:
                entries.append(entry)
            elif self._removed.get(address) == changed:
                removed.append(address)
        return Changes(tuple(entries), tuple(removed), self.version)

    def _logged(self, address: str) -> int:
        """Record a change of what is at an address; returns its version."""
        if len(self._log) > 2 * (len(self._entries) + len(self._removed)) + 64:  # most are outdated
            self._log = sorted(
                [(entry.version, address) for address, entry in self._entries.items()]
                + [(version, address) for address, version in self._removed.items()]
            )
        self.version += 1
        self._log.append((self.version, address))
        return self.version

    def _remove(self, entry: Entry) -> None:
        address = entry.listing.address
        del self._entries[address], self._sorted[bisect_left(self._sorted, address)]
        del self._addresses[entry.writer], self._instances[entry.listing.instance]
        self._removed[address] = self._logged(address)
        self._removed.move_to_end(address)
        if len(self._removed) > MAX_REMOVED:
            _, self._forgotten = self._removed.popitem(last=False)
