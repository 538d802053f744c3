"""The schedulers that a client uses: those its user gave, and those that they know. Pure: time is passed in.

DIRECTORY in scheduler.proto. Entries are claims of whoever wrote them: here is decided which get a token.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from paceline.channel import Metadata, Security, is_loopback
from paceline.scheduler.v1 import scheduler_pb2 as pb

DirectoryUse = Literal["off", "safe", "any"]
"""Which schedulers of a directory a client uses: see `KnownSchedulers`."""

OTHER_MODEL = "OTHER_MODEL"
"""Reason of the client's own error for a learned scheduler that serves another model than its entry says."""
LOOK_EVERY_S = 10.0
"""Time between two looks into a directory, while calls begin."""
LOOK_AGAIN_S = 1.0
"""Time from a look that failed to the next one, at another scheduler."""
NO_DIRECTORY_S = 300.0
"""Time for which a scheduler that has said that it has no directory is not asked again."""
LOOK_TIMEOUT_S = 5.0
VIEW_ROUNDS = 3
"""Rounds of looks, one at each given scheduler, after which older words are dropped for newer ones."""
MAX_LEARNED = 1024
"""Schedulers that a client learns of, at most."""
MAX_ENTRIES = 10_000
"""Entries of one look that are read: as many as a directory has at most."""
MAX_LOOK_BYTES = 16 << 20
"""Of one look's answer, each message counted as MESSAGE_BYTES more than it has."""
MESSAGE_BYTES = 64 << 10
_MAX_REMEMBERED = 1024  # liars, and callers whose looks were refused
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_NO_HOST = re.compile(
    r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds|passthrough|google-c2p|google-c2p-experimental):",
    re.IGNORECASE,
)
"""What gRPC takes for a scheme, though a port follows."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What an entry of a directory says of a scheduler."""

    address: str
    instance: str
    tls_name: str
    model_fingerprint: bytes
    load: int  # running and waiting sequences
    drains: bool
    adapters: frozenset[str]


@dataclass(frozen=True, slots=True)
class _View:
    """What one scheduler listed of others."""

    at: float
    entries: tuple[Learned, ...]


class KnownSchedulers:
    """The addresses given by the user, which stay, and those learned from the directories of schedulers.

    A learned address is used only for a model of the same name as that of the scheduler which listed it, and
    for another fingerprint only once none of the present one takes calls (`foreign`). With "safe"
    it is used over TLS, by the authority that the client trusts already and under the name that the entry
    gives; or without TLS on loopback, if the scheduler which listed it is on this machine too. With "any"
    also without TLS elsewhere, if the client has no authority. A scheduler is known once, however many
    addresses it has. Safe in several threads.
    """

    def __init__(self, given: Sequence[str], security: Security, use: DirectoryUse) -> None:
        self.given = tuple(given)
        self._security, self._use = security, use
        self._changing = threading.RLock()
        self._views: dict[str, _View] = {}  # by the address of the scheduler that listed them
        self._own: dict[str, Learned] = {}  # by given address: what it says of itself
        self._liars: dict[tuple[str, str], None] = {}  # (address, instance): of that start of the scheduler
        self._checked: frozenset[tuple[str, str]] = frozenset()  # the same, of those that serve the model
        self._learned: dict[str, Learned] = {}
        self._next_look = 0.0 if use != "off" else float("inf")
        self._without: dict[str, float] = {}  # address: until when it is not asked for a directory
        self._refused: dict[int, float] = {}  # hash of a caller's metadata: until when it does not look
        self._turn = 0
        self._model = b""  # the fingerprint that new calls get
        self._silent: set[str] = set()  # those at which looks failed since the last one that did not
        self.has_looked = use == "off"
        """Whether a look has ended, well or not."""

    def is_time_to_look(self, now: float, caller: Metadata = ()) -> bool:
        """Whether it is time for a look into a directory; if so, the time of the next one is set."""
        with self._changing:
            if now < max(self._next_look, self._refused.get(hash(caller), 0.0)):
                return False
            self._next_look = now + LOOK_EVERY_S
            return True

    def teller(self, now: float, is_down: Callable[[str, float], bool]) -> str:
        """Whom to ask: a given one that is up, in turn; else a learned one; else one that is down.

        One at which a look has just failed comes last, though it may count as up again by now.
        """
        with self._changing:
            self._turn += 1
            asked = [one for one in self.addresses if self._without.get(one, 0.0) <= now] or self.given
            begin = self._turn % len(asked)
            turn: list[str] = [*asked[begin:], *asked[:begin]]
            foreign, silent = self.foreign, self._silent
            return min(
                turn,
                key=lambda one: (one in silent, is_down(one, now), one in foreign, one not in self.given),
            )

    def saw(self, teller: str, entries: Iterable[pb.SchedulerEntry], now: float) -> None:
        """Record all entries of the directory of the scheduler at `teller`."""
        listed = list(islice(entries, MAX_ENTRIES))
        own = next((entry for entry in listed if not entry.written_by), None)
        with self._changing:
            self.has_looked = True
            self._silent.clear()
            if own is None:
                return
            if teller in self.given:
                self._own[teller] = _learned(own)
            elif own.model_fingerprint and not self.is_what_it_says(teller, own.model_fingerprint):
                self.distrust(teller)
                return
            if not own.model_fingerprint:
                return  # it is loading: what it listed before stays
            self._model = own.model_fingerprint
            self._views[teller] = _View(
                now,
                tuple(
                    _learned(entry)
                    for entry in listed
                    if entry.model == own.model
                    and entry.model_fingerprint
                    and entry.instance
                    and (entry.instance != own.instance or entry.address == teller)
                    and self._may_get_a_token(entry, teller)
                ),
            )
            self._join(now)

    def lost(self, teller: str, now: float) -> None:
        """Record that the directory of `teller` could not be had: what it listed is kept if it is all."""
        with self._changing:
            self.has_looked = True
            self._silent.add(teller)
            if self._silent.issuperset(self.addresses):
                self._silent.clear()
                self._next_look = now + LOOK_EVERY_S
            else:
                self._next_look = now + LOOK_AGAIN_S
            if len(self._views) > 1:
                self._views.pop(teller, None)
                self._join(now)

    def refused(self, caller: Metadata, now: float) -> None:
        """Record that a scheduler did not let this caller look: others may look at once."""
        with self._changing:
            self.has_looked = True
            self._next_look = min(self._next_look, now)
            self._refused[hash(caller)] = now + LOOK_EVERY_S
            _bound(self._refused)

    def has_none(self, teller: str, now: float) -> None:
        """Record that the scheduler at `teller` has no directory."""
        with self._changing:
            self.has_looked = True
            self._views.pop(teller, None)
            self._join(now)
            known = self.addresses
            self._without = {one: end for one, end in self._without.items() if one in known}
            self._without[teller] = now + NO_DIRECTORY_S
            self._next_look = now if len(self._without) < len(known) else min(self._without.values())

    def distrust(self, address: str) -> None:
        """Record that what is at a learned address is not what its entry says: it is used no more.

        Until it is another start of a scheduler: an instance of the same address.
        """
        with self._changing:
            if (one := self._learned.get(address)) is not None:
                self._liars[address, one.instance] = None
                _bound(self._liars)
                self._join()

    @property
    def addresses(self) -> tuple[str, ...]:
        """All that are used: the given ones, then the learned ones."""
        return (*self.given, *self._learned)

    @property
    def loads(self) -> dict[str, int]:
        """Running and waiting sequences of those that a directory has."""
        return {address: one.load for address, one in self._entries().items()}

    @property
    def draining(self) -> frozenset[str]:
        """Those that take no new requests."""
        return frozenset(address for address, one in self._entries().items() if one.drains)

    @property
    def adapters(self) -> dict[str, frozenset[str]]:
        """Names that those have which a directory has."""
        return {address: one.adapters for address, one in self._entries().items()}

    @property
    def models(self) -> dict[str, bytes]:
        """Fingerprints of the models of those that a directory has."""
        return {address: one.model_fingerprint for address, one in self._entries().items()}

    @property
    def foreign(self) -> frozenset[str]:
        """Learned ones with another model of the same name, as in the middle of a fleet's update."""
        learned = self._learned.items()
        return frozenset(address for address, one in learned if one.model_fingerprint != self._model)

    def security(self, address: str) -> Security | None:
        """Of the channel to an address; None: it is not known, or no more."""
        if address in self.given:
            return self._security
        one = self._learned.get(address)
        return None if one is None else replace(self._security, server_name=one.tls_name)

    def is_what_it_says(self, address: str, model_fingerprint: bytes) -> bool:
        """Whether a scheduler that reports this model may be the one of the entry; given ones always are."""
        if address in self.given:
            return True
        with self._changing:
            one = self._learned.get(address)
            if one is None or one.model_fingerprint != model_fingerprint:
                return False
            self._checked |= {(address, one.instance)}
            return True

    def is_checked(self, address: str) -> bool:
        """Whether it has reported the model of its entry since its start, or is a given one."""
        one = self._learned.get(address)
        return address in self.given or (one is not None and (address, one.instance) in self._checked)

    def _entries(self) -> Mapping[str, Learned]:
        """All that is known, by address; of the given ones, what they say of themselves."""
        return {**self._own, **self._learned}

    def _may_get_a_token(self, entry: pb.SchedulerEntry, teller: str) -> bool:
        if not _HOST_PORT.fullmatch(entry.address) or _NO_HOST.match(entry.address):
            return False  # a socket, a list of addresses, or whatever else gRPC may take for a target
        if self._security.ca_file is not None:
            return bool(entry.tls_name)
        if entry.tls_name:
            return False  # it speaks TLS, and the client knows no authority
        if is_loopback(entry.address):
            return is_loopback(teller)
        return self._use == "any"

    def _join(self, now: float | None = None) -> None:
        """Join what all have listed: a scheduler is known while one of them lists it.

        The word of a given scheduler counts more than that of a learned one, and a newer more than an older.
        """
        if now is not None and self._views:
            newest = max(view.at for view in self._views.values())
            oldest = min(newest, now - VIEW_ROUNDS * LOOK_EVERY_S * len(self.given))
            self._views = {teller: view for teller, view in self._views.items() if view.at >= oldest}
        listed: dict[str, Learned] = {}
        for _, view in sorted(self._views.items(), key=lambda item: (item[0] in self.given, item[1].at)):
            listed.update((one.address, one) for one in view.entries)
        known = {one.instance for one in self._own.values()}
        joined: dict[str, Learned] = {}
        for address, one in sorted(
            listed.items(), key=lambda item: (item[1].model_fingerprint != self._model, item[0])
        ):
            if address in self.given or (address, one.instance) in self._liars or one.instance in known:
                continue
            if len(joined) < MAX_LEARNED:
                joined[address] = one
                known.add(one.instance)
        self._learned = joined
        self._checked &= {(address, one.instance) for address, one in joined.items()}


def _learned(entry: pb.SchedulerEntry) -> Learned:
    return Learned(
        entry.address,
        entry.instance,
        entry.tls_name,
        entry.model_fingerprint,
        entry.load.running + entry.load.waiting,
        entry.state == pb.SCHEDULER_STATE_DRAINING,
        frozenset(entry.adapters),
    )


def _bound(remembered: dict[Any, Any]) -> None:
    """Forget the oldest above _MAX_REMEMBERED."""
    while len(remembered) > _MAX_REMEMBERED:
        del remembered[next(iter(remembered))]
