"""The directory of a running scheduler: its own entry, and watchers that wait for changes."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scheduler_service.directory.directory import (
    MOVE_S,
    AddressTakenError,
    Changes,
    Directory,
    DirectoryFullError,
    Entry,
    MovedTooSoonError,
    OldGenerationError,
    Rank,
    TooFarBehindError,
)
from scheduler_service.directory.listing import Listing
from scheduler_service.errors import RETRY_AFTER_S, ErrorReason, ServiceError

OWN = ""
"""The writer of the scheduler's own entry."""
RENEWAL_S = 5.0
"""Age at which the own entry is written again, changed or not: its watchers see that the scheduler lives."""
MAX_WATCHERS, MAX_WATCHERS_PER_IDENTITY = 2048, 1024
PAUSE_S, ENTRIES_PER_S, ALL_ENTRIES_PER_S = 0.5, 200, 40_000
"""Bounds of what is sent: the least time between two messages, the rate of a watcher, and that of all."""


class LiveDirectory:
    """A Directory with a clock and watchers.

    `own` makes the scheduler's own listing. `refresh` is to be called about every half second.
    """

    def __init__(self, own: Callable[[], Listing], clock: Callable[[], float] = time.monotonic) -> None:
        self._own, self._clock = own, clock
        self._directory = Directory()
        self._watchers: Counter[str] = Counter()  # by identity
        self._change = asyncio.Event()  # replaced at each change

    @property
    def own_instance(self) -> str:
        """What this scheduler drew at its start."""
        return self._own().instance

    @property
    def version(self) -> int:
        """Rises with each change."""
        return self._directory.version

    @property
    def pause_s(self) -> float:
        """How long a watcher waits after a change, and collects others."""
        entries, watchers = len(self._directory), self._watchers.total()
        return max(PAUSE_S, entries / ENTRIES_PER_S, entries * watchers / ALL_ENTRIES_PER_S)

    def refresh(self) -> None:
        """Write the own entry if it has changed or is old, and drop entries whose time is over."""
        now, listing, seen = self._clock(), self._own(), self._directory.version
        entry = self._directory.of(OWN)
        if entry is None or entry.listing != listing or now - entry.written_at >= RENEWAL_S:
            self._directory.write(listing, OWN, Rank.OWN, now, math.inf)
        self._directory.expire(now)
        self._notify(seen)

    def write(self, listing: Listing, writer: str, rank: Rank, ttl_s: float) -> None:
        """Write the writer's entry. Raises ServiceError."""
        _ = self.own_entry
        seen = self._directory.version
        try:
            self._directory.write(listing, writer, rank, self._clock(), ttl_s)
        except AddressTakenError:
            why = f"entry.address: {listing.address}, or entry.instance, is in another entry"
            raise ServiceError(ErrorReason.ADDRESS_TAKEN, why, metadata={"field": "entry.address"}) from None
        except OldGenerationError as error:
            why = f"entry.generation: the entry has {error}, which is higher"
            fields = {"field": "entry.generation"}
            raise ServiceError(ErrorReason.OLD_GENERATION, why, metadata=fields) from None
        except MovedTooSoonError:
            why = f"entry.address: it changes once in {MOVE_S:g} s at most"
            fields = {"field": "entry.address"}
            raise ServiceError(ErrorReason.QUOTA, why, retry_after_s=MOVE_S, metadata=fields) from None
        except DirectoryFullError as error:
            why = f"the directory has {error} entries, and no room for another"
            raise ServiceError(ErrorReason.DIRECTORY_FULL, why, retry_after_s=RETRY_AFTER_S) from None
        finally:
            self._notify(seen)

    def remove(self, writer: str) -> None:
        """Remove the writer's entry, if it has one."""
        seen = self._directory.version
        self._directory.remove(writer)
        self._notify(seen)

    @contextmanager
    def watching(self, identity: str) -> Iterator[None]:
        """Count a watcher. Raises ServiceError if there are too many."""
        if self._watchers[identity] >= MAX_WATCHERS_PER_IDENTITY or self._watchers.total() >= MAX_WATCHERS:
            why = "too many calls watch the directory"
            raise ServiceError(ErrorReason.WATCHERS, why, retry_after_s=RETRY_AFTER_S)
        self._watchers[identity] += 1
        try:
            yield
        finally:
            self._watchers[identity] -= 1
            if not self._watchers[identity]:
                del self._watchers[identity]

    @property
    def own_entry(self) -> Entry:
        """The scheduler's own."""
        if (entry := self._directory.of(OWN)) is None:
            self.refresh()
            entry = self._directory.of(OWN)
        assert entry is not None
        return entry

    def listed(self, after: str, limit: int) -> list[Entry]:
        """As `Directory.listed`."""
        _ = self.own_entry
        return self._directory.listed(after, limit)

    def since(self, version: int, limit: int) -> Changes:
        """As `Directory.since`. Raises ServiceError for a watcher that has missed too many."""
        try:
            return self._directory.since(version, limit)
        except TooFarBehindError:
            why = "this call was not read for too long: call again"
            raise ServiceError(ErrorReason.STALLED_READER, why, retry_after_s=RETRY_AFTER_S) from None

    async def changed(self, version: int, *, own: bool = False) -> None:
        """Wait for a change after `version` (`own`: of the own entry), and for others that follow it."""
        while (self.own_entry.version if own else self._directory.version) == version:
            await self._change.wait()
        await asyncio.sleep(PAUSE_S if own else self.pause_s)

    def _notify(self, seen: int) -> None:
        if self._directory.version != seen:
            self._change.set()
            self._change = asyncio.Event()
