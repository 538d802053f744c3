"""Handlers of the directory: who watches it, and who may write into it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import grpc.aio
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.credentials import Credentials
from service_kit.identity import LOCAL, peer_name
from service_kit.status import end_call

from scheduler_service.directory.codec import decode_entry, encode_entry
from scheduler_service.directory.directory import Changes, Entry, Rank
from scheduler_service.directory.live import OWN, LiveDirectory
from scheduler_service.directory.places import is_here
from scheduler_service.errors import ErrorReason, ServiceError, invalid, not_served
from scheduler_service.rpc.codec.checks import check_range
from scheduler_service.rpc.statuses import status_of

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

ENTRIES_PER_MESSAGE = 128
MIN_TTL_MS, DEFAULT_TTL_MS, MAX_TTL_MS = 1_000, 30_000, 600_000


class DirectoryCalls:
    """WatchSchedulers and AnnounceScheduler. Without a directory both are UNIMPLEMENTED."""

    def __init__(self, directory: LiveDirectory | None, credentials: Credentials) -> None:
        self._directory, self._credentials = directory, credentials

    async def watch(self, request: pb.WatchSchedulersRequest, context: _Context) -> None:
        """Send every entry, then changes, until the client leaves. At most one message waits to be read."""
        if (directory := self._directory) is None:
            # Each client asks once: that is no error to be counted and logged.
            ending = end_call(context, status_of(not_served("WatchSchedulers")))
            del request, context  # see end_call
            await ending
        caller = self._credentials.identify(context)
        shown = Shown(own=request.own, near=is_near(context))
        with directory.watching(caller.name):
            changes, first = directory.all(), True
            while True:
                for message in shown.messages(changes, complete=first):
                    await context.write(message)
                first = False
                changes = await directory.changed(changes.version)

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

    def __init__(self, *, own: bool, near: bool) -> None:
        self._own, self._near = own, near

    def messages(self, changes: Changes, *, complete: bool) -> Iterator[pb.WatchSchedulersResponse]:
        """The messages with these changes. The last one is `complete` if asked for; none if all is hidden."""
        entries = [entry for entry in changes.entries if self._sees(entry)]
        removed = [] if self._own else [address for address in changes.removed if self._may_see(address)]
        for begin in range(0, len(removed), ENTRIES_PER_MESSAGE):
            yield pb.WatchSchedulersResponse(removed=removed[begin : begin + ENTRIES_PER_MESSAGE])
        parts = list(_parts(entries)) or ([[]] if complete else [])
        for number, part in enumerate(parts, 1):
            now = time.monotonic()
            yield pb.WatchSchedulersResponse(
                entries=[encode_entry(entry, now) for entry in part],
                complete=complete and number == len(parts),
            )

    def _sees(self, entry: Entry) -> bool:
        return (entry.writer == OWN or not self._own) and self._may_see(entry.listing.address)

    def _may_see(self, address: str) -> bool:
        return self._near or not is_here(address)


def _parts(entries: Iterable[Entry]) -> Iterator[Sequence[Entry]]:
    rest = iter(entries)
    while part := list(islice(rest, ENTRIES_PER_MESSAGE)):
        yield part
