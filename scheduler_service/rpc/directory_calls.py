"""Handlers of the directory: who watches it, and who may write into it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, TypeAlias

import grpc.aio
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.credentials import Credentials
from service_kit.identity import LOCAL, peer_name
from service_kit.status import end_call

from scheduler_service.directory.codec import add_entry, decode_entry
from scheduler_service.directory.directory import Entry, Rank
from scheduler_service.directory.listing import MAX_ENTRY_BYTES
from scheduler_service.directory.live import LiveDirectory
from scheduler_service.directory.places import is_here
from scheduler_service.errors import ErrorReason, ServiceError, invalid, not_served
from scheduler_service.rpc.codec.checks import check_range
from scheduler_service.rpc.statuses import status_of

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

ENTRIES_PER_READ, MESSAGE_BYTES = 128, 128 << 10
"""Bounds of what waits for a watcher that does not read."""
MIN_TTL_MS, DEFAULT_TTL_MS, MAX_TTL_MS = 1_000, 30_000, 600_000


class DirectoryCalls:
    """WatchSchedulers and AnnounceScheduler. Without a directory both are UNIMPLEMENTED."""

    def __init__(self, directory: LiveDirectory | None, credentials: Credentials) -> None:
        self._directory, self._credentials = directory, credentials

    async def watch(self, request: pb.WatchSchedulersRequest, context: _Context) -> None:
        """Send every entry, then changes, until the client leaves."""
        if (directory := self._directory) is None:
            # Each client asks once: that is no error to be counted and logged.
            ending = end_call(context, status_of(not_served("WatchSchedulers")))
            del request, context  # see end_call
            await ending
        caller = self._credentials.identify(context)
        shown = Shown(near=is_near(context))
        with directory.watching(caller.name):
            async for message in _own(directory, shown) if request.own else _all(directory, shown):
                await context.write(message)

    def announce(
        self, request: pb.AnnounceSchedulerRequest, context: _Context
    ) -> pb.AnnounceSchedulerResponse:
        """Write the caller's entry. Raises ServiceError."""
        if (directory := self._directory) is None:
            raise not_served("AnnounceScheduler")
        caller = self._credentials.identify(context)
        if not caller.directory:
            why = "AnnounceScheduler is for tokens with the right `directory`, which this caller's has not"
            raise ServiceError(ErrorReason.PERMISSION, why)
        if not request.HasField("entry"):
            raise invalid("entry", "is missing")
        if request.entry.written_by or request.entry.age_ms:
            raise invalid("entry", "written_by and age_ms are set by the directory")
        ttl_ms = request.ttl_ms or DEFAULT_TTL_MS
        check_range("ttl_ms", ttl_ms, MIN_TTL_MS, MAX_TTL_MS)
        listing = decode_entry(request.entry)
        if not listing.model:
            raise invalid("entry.model", "is missing")
        if is_here(listing.address) and not is_near(context):
            raise invalid("entry.address", "is a loopback address, and the caller is on another machine")
        directory.write(listing, caller.name, Rank.ANNOUNCED, ttl_ms / 1000)
        return pb.AnnounceSchedulerResponse(ttl_ms=ttl_ms)


def is_near(context: _Context) -> bool:
    """Whether the caller is on this machine: loopback addresses lead nowhere for others."""
    return peer_name(context.peer()) == LOCAL


class Shown:
    """What one watcher gets: loopback addresses lead nowhere for one that is not on this machine (`near`)."""

    def __init__(self, *, near: bool) -> None:
        self._near = near

    def messages(
        self, entries: Iterable[Entry], removed: Iterable[str] = (), *, complete: bool = False
    ) -> Iterator[pb.WatchSchedulersResponse]:
        """Messages with these, of MESSAGE_BYTES at most. The last one is `complete` if asked for."""
        message, size, now = pb.WatchSchedulersResponse(), 0, time.monotonic()
        message.removed.extend(address for address in removed if self._may_see(address))
        if message.removed:
            yield message
            message = pb.WatchSchedulersResponse()
        for entry in entries:
            if not self._may_see(entry.listing.address):
                continue
            if size > MESSAGE_BYTES - MAX_ENTRY_BYTES:
                yield message
                message, size = pb.WatchSchedulersResponse(), 0
            size += add_entry(message, entry, now)
        message.complete = complete
        if message.entries or complete:
            yield message

    def _may_see(self, address: str) -> bool:
        return self._near or not is_here(address)


async def _all(directory: LiveDirectory, shown: Shown) -> AsyncIterator[pb.WatchSchedulersResponse]:
    """Every entry, then changes. Between two messages nothing is held but the place in the list."""
    seen, after, complete = directory.version, "", False
    while not complete:
        entries = directory.listed(after, ENTRIES_PER_READ)
        complete = len(entries) < ENTRIES_PER_READ
        after = entries[-1].listing.address if entries else after
        for message in shown.messages(entries, complete=complete):
            yield message
    while True:
        await directory.changed(seen)
        now = directory.version
        while seen < now:
            changes = directory.since(seen, ENTRIES_PER_READ)
            seen = changes.version
            for message in shown.messages(changes.entries, changes.removed):
                yield message


async def _own(directory: LiveDirectory, shown: Shown) -> AsyncIterator[pb.WatchSchedulersResponse]:
    """The scheduler's own entry, at once and whenever it is written. The first message is `complete`."""
    is_first = True
    while True:
        entry = directory.own_entry
        for message in shown.messages([entry], complete=is_first):
            yield message
        is_first = False
        await directory.changed(entry.version, own=True)
