"""The directory's entries: who may write which, when they go, what has changed. Pure: time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_service.directory.listing import Listing

MAX_ENTRIES = 10_000
MAX_REMOVED = 4096
"""Addresses of removed entries that are remembered for watchers."""


class AddressTakenError(Exception):
    """The entry of another writer, or of this scheduler itself, has the address."""


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
    written_at: float
    expires_at: float
    version: int  # of the directory, when the entry was written last


@dataclass(frozen=True, slots=True)
class Changes:
    """What has happened in the directory up to `version`."""

    entries: tuple[Entry, ...]  # new or changed ones, in the order in which they were written
    removed: tuple[str, ...]  # addresses
    version: int


class Directory:
    """Entries by address. A writer has at most one, and writes only where no other writer's entry is.

    `version` rises with each change; a watcher asks for what changed since the version that it has seen.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.version = 0
        self._max_entries = max_entries
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # by address; the entry written last is last
        self._addresses: dict[str, str] = {}  # by writer
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

    def write(self, listing: Listing, writer: str, now: float, ttl_s: float) -> None:
        """Write the writer's entry, in place of the one that it has.

        Raises AddressTakenError, OldGenerationError or DirectoryFullError; then nothing has changed.
        """
        old = self._entries.get(listing.address)
        if old is not None and old.writer != writer:
            raise AddressTakenError(listing.address)
        own = self.of(writer)
        if own is not None and listing.generation < own.listing.generation:
            raise OldGenerationError(str(own.listing.generation))
        if own is None and len(self._entries) >= self._max_entries:
            raise DirectoryFullError(str(self._max_entries))
        if own is not None and own.listing.address != listing.address:
            self._remove(own)
        self.version += 1
        self._entries[listing.address] = Entry(listing, writer, now, now + ttl_s, self.version)
        self._entries.move_to_end(listing.address)
        self._addresses[writer] = listing.address
        self._removed.pop(listing.address, None)

    def remove(self, writer: str) -> None:
        """Remove the writer's entry, if it has one."""
        if (entry := self.of(writer)) is not None:
            self._remove(entry)

    def expire(self, now: float) -> None:
        """Remove the entries whose time is over."""
        for entry in [entry for entry in self._entries.values() if entry.expires_at <= now]:
            self._remove(entry)

    def since(self, version: int) -> Changes:
        """What has changed after `version`. Raises TooFarBehindError."""
        if version < self._forgotten:
            raise TooFarBehindError
        entries: list[Entry] = []
        for entry in reversed(self._entries.values()):
            if entry.version <= version:
                break
            entries.append(entry)
        removed = [address for address, at in self._removed.items() if at > version]
        return Changes(tuple(reversed(entries)), tuple(removed), self.version)

    def all(self) -> Changes:
        """Every entry."""
        return Changes(tuple(self._entries.values()), (), self.version)

    def _remove(self, entry: Entry) -> None:
        address = entry.listing.address
        del self._entries[address]
        del self._addresses[entry.writer]
        self.version += 1
        self._removed[address] = self.version
        self._removed.move_to_end(address)
        if len(self._removed) > MAX_REMOVED:
            _, self._forgotten = self._removed.popitem(last=False)
