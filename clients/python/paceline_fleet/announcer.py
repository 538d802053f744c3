"""Announces a stack's scheduler to the directories of the others, with the stack's own token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import grpc.aio
from paceline.channel import Link, Security, is_loopback, open_aio_channel
from paceline.scheduler.v1 import scheduler_pb2 as pb
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

TTL_S = 15.0
EVERY_S = 2.0
"""Time between two announcements of an unchanged entry: a scheduler that restarts knows all so soon."""
_TIMEOUT_S = 3.0


class Announcer:
    """Announces one entry to any number of schedulers, each over a channel of its own.

    `say` gets each refusal, once until the next success. The token goes over TLS to who has a
    certificate of `authority` under the name that was reported; without an authority to loopback, and beyond
    if `insecure`.
    """

    def __init__(self, authority: Path | None, say: Callable[[str], None], *, insecure: bool = False) -> None:
        self._authority, self._say, self._insecure = authority, say, insecure
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._sent: dict[tuple[str, str], tuple[bytes, float]] = {}
        self._refused: set[tuple[str, str]] = set()

    async def announce(self, entry: pb.SchedulerEntry, others: Iterable[tuple[str, str]], token: str) -> None:
        """Announce the entry to each of (address, TLS name) where it has changed or is due again."""
        wanted = {other for other in others if self._may_get_a_token(*other)}
        for gone in self._channels.keys() - wanted:
            await self._channels.pop(gone).close()
            self._sent.pop(gone, None)
            self._refused.discard(gone)
        content, now = entry.SerializeToString(deterministic=True), time.monotonic()
        due = [
            other
            for other in wanted
            if (sent := self._sent.get(other)) is None or sent[0] != content or now - sent[1] >= EVERY_S
        ]
        outcomes = await asyncio.gather(*(self._send(other, entry, token) for other in due))
        self._sent.update((other, (content, now)) for other, done in zip(due, outcomes, strict=True) if done)

    def _may_get_a_token(self, address: str, tls_name: str) -> bool:
        if self._authority is not None:
            return bool(tls_name)
        return not tls_name and (self._insecure or is_loopback(address))

    async def _send(self, other: tuple[str, str], entry: pb.SchedulerEntry, token: str) -> bool:
        address, tls_name = other
        security = Security(self._authority, token=token, server_name=tls_name)
        if other not in self._channels:
            self._channels[other] = open_aio_channel(address, Link.PUBLIC, security)
        request = pb.AnnounceSchedulerRequest(entry=entry, ttl_ms=int(TTL_S * 1000))
        stub = SchedulerServiceStub(self._channels[other])
        try:
            await stub.AnnounceScheduler(request, metadata=security.metadata, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if other not in self._refused:
                self._refused.add(other)
                self._say(
                    f"{address} does not take this stack's entry: {error.code().name}: {error.details()}"
                )
            return False
        self._refused.discard(other)
        return True

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


async def own_entry(socket: str, security: Security) -> pb.SchedulerEntry | None:
    """What a scheduler says of itself, asked over its Unix socket; None where it does not answer now."""
    async with open_aio_channel(socket, Link.PUBLIC) as channel:
        stub = SchedulerServiceStub(channel)
        request = pb.WatchSchedulersRequest(own=True)
        call = stub.WatchSchedulers(request, metadata=security.metadata, timeout=_TIMEOUT_S)
        try:
            async for message in call:
                for entry in message.entries:
                    entry.ClearField("written_by")
                    entry.ClearField("age_ms")
                    return pb.SchedulerEntry.FromString(entry.SerializeToString())
        except grpc.aio.AioRpcError:
            return None
        finally:
            call.cancel()
    return None
