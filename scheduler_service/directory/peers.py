"""Follows what other schedulers say of themselves, and writes it into the directory."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import grpc.aio
from google.protobuf.message import DecodeError
from paceline.channel import Link, Security, open_aio_channel
from paceline.names import dns_name
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.logs import Log

from scheduler_service.directory.codec import decode_entry
from scheduler_service.directory.directory import Rank
from scheduler_service.directory.live import PAUSE_S, RENEWAL_S, LiveDirectory
from scheduler_service.directory.places import is_here, one_spelling
from scheduler_service.errors import ServiceError, invalid

log = Log(__name__)

PEER_TTL_S = 3 * RENEWAL_S
"""Age at which the entry of a scheduler goes that says nothing any more."""
MIN_WAIT_S, MAX_WAIT_S = 0.5, 8.0
"""Wait before the next attempt to reach a scheduler; doubles with each call that ends within PEER_TTL_S."""
ITSELF, ITSELF_WAIT_S = "it is this scheduler", 30.0
"""Where a name led to this scheduler itself: the wait before it is looked up again."""
READ_PAUSE_S = PAUSE_S / 2
"""Least time between two messages that are read from a peer, which sends one every PAUSE_S at most."""
RESOLVE_S = 10.0
"""Time between two resolutions of the peers' names."""
_WATCH = "/paceline.scheduler.v1.SchedulerService/WatchSchedulers"
MAX_PEERS = 256
"""Addresses that are followed: each scheduler follows each other one."""


class Peers:
    """Other schedulers, by their addresses; a name of DNS stands for all of its addresses.

    Each is asked for its own entry alone, so that nobody writes another's. `security` is of the connections.
    """

    def __init__(self, addresses: tuple[str, ...], security: Security, directory: LiveDirectory) -> None:
        self._addresses, self._security, self._directory = addresses, security, directory
        self._followed: dict[str, asyncio.Task[None]] = {}  # by address of one scheduler
        self._instances: dict[str, str] = {}  # that were heard last, by the same

    async def run(self) -> None:
        """Follow them until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._resolve(group)
                await asyncio.sleep(RESOLVE_S)

    async def _resolve(self, group: asyncio.TaskGroup) -> None:
        """Follow the addresses that the names have now, and no others."""
        wanted: dict[str, str] = {}  # address: the name that its certificate has, if that is not its own
        failed = False
        for address in self._addresses:
            name = dns_name(address)
            if name is None:
                wanted[address] = ""
                continue
            try:
                found = await _addresses_of(address, name)
            except OSError as error:
                log.warning("a peer's name has no address", peer=address, detail=str(error))
                failed = True
                continue
            wanted |= dict.fromkeys(found, name)
        if len(wanted) > MAX_PEERS:
            log.error("more peers than are followed", peers=len(wanted), bound=MAX_PEERS)
        wanted = dict(sorted(wanted.items())[:MAX_PEERS])
        for address in [] if failed else self._followed.keys() - wanted.keys():
            self._followed.pop(address).cancel()  # its entry goes by its age
            self._instances.pop(address, None)
        for address in wanted.keys() - self._followed.keys():
            tls = self._security.ca_file is not None
            security = replace(self._security, server_name=wanted[address] if tls else "")
            self._followed[address] = group.create_task(
                self._follow(address, security), name=f"peer {address}"
            )

    async def _follow(self, address: str, security: Security) -> None:
        """Follow one scheduler until cancelled. If it is this one, look again later: a name may move on."""
        wait_s, state = MIN_WAIT_S, ""

        def heard() -> None:
            nonlocal state
            state = _logged(address, state, "")

        while True:
            began = time.monotonic()
            problem = await self._listen(address, security, heard)
            if time.monotonic() - began > PEER_TTL_S:
                wait_s = MIN_WAIT_S
            if problem == ITSELF:
                await asyncio.sleep(ITSELF_WAIT_S)
                continue
            if state and problem.startswith("UNAVAILABLE"):
                self._directory.remove(_writer(address))  # the second attempt in a row that can't reach it
            state = _logged(address, state, problem)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    async def _listen(self, address: str, security: Security, heard: Callable[[], None]) -> str:
        """Write what one scheduler says, until it ends or says what it must not; returns why it ended.

        Nothing that it sends, and no file that is missing, raises. `heard` is called after each message.
        """
        try:
            async with open_aio_channel(address, Link.PUBLIC, security) as channel:
                # Bytes, not messages: gRPC logs a traceback for each that can't be parsed, and yields None.
                method: grpc.aio.UnaryStreamMultiCallable[pb.WatchSchedulersRequest, bytes] = (
                    channel.unary_stream(
                        _WATCH,
                        request_serializer=pb.WatchSchedulersRequest.SerializeToString,
                        response_deserializer=lambda data: data,
                    )
                )
                call = method(pb.WatchSchedulersRequest(own=True), metadata=security.metadata)
                messages = aiter(call)
                while True:
                    async with asyncio.timeout(PEER_TTL_S):
                        data = await anext(messages, None)
                    if data is None:
                        return "it ended the call"
                    if not self._learn(pb.WatchSchedulersResponse.FromString(data), address):
                        return ITSELF
                    heard()
                    await asyncio.sleep(READ_PAUSE_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except ServiceError as error:
            return error.message
        except DecodeError:
            return "it sent what is no message"
        except TimeoutError:
            return f"it said nothing for {PEER_TTL_S:g} s"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"

    def _learn(self, message: pb.WatchSchedulersResponse, address: str) -> bool:
        """Write what a peer says of itself. Returns False if it is this scheduler. Raises ServiceError."""
        if message.removed:
            self._directory.remove(_writer(address))
        if message.complete and not message.entries:
            raise invalid("entries", "none for callers from here: --advertise is a loopback address there")
        for entry in message.entries[:1]:
            listing = decode_entry(entry)
            if is_here(listing.address) and not is_here(address):
                raise invalid("entry.address", "is a loopback address, and the peer is on another machine")
            if listing.instance == self._directory.own_instance:
                return False
            if self._instances.get(address) != listing.instance:
                self._directory.remove(_writer(address))  # another start, or another scheduler of the name
            self._instances[address] = listing.instance
            rank = Rank.REACHED if listing.address == _place(address) else Rank.CLAIMED
            self._directory.write(listing, _writer(address), rank, PEER_TTL_S)
        return True


def _place(address: str) -> str:
    """A peer's address as the directory writes it; "" for one that an entry can't have."""
    try:
        return one_spelling(address)
    except ValueError:
        return ""


def _writer(address: str) -> str:
    """Who writes a peer's entry."""
    return f"peer {address}"


def _logged(address: str, before: str, problem: str) -> str:
    """Log a change of what is known of a peer; returns `problem`."""
    if problem and problem != before:
        log.warning("a peer's entry can't be had", peer=address, detail=problem[:256])
    if before and not problem:
        log.info("a peer's entry is there again", peer=address)
    return problem


async def _addresses_of(address: str, name: str) -> list[str]:
    """The addresses of a name, HOST:PORT each. Raises OSError."""
    port = address.rpartition(":")[2]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError("not a name of DNS") from None
    fours = [f"{place[0]}:{port}" for family, *_, place in found if family == socket.AF_INET]
    # Addresses of both IP versions belong to the same hosts.
    return fours or [f"[{place[0]}]:{port}" for *_, place in found]
