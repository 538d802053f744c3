"""The schedulers that a client uses: those its user gave, and those that they know. Pure: time is passed in.

DIRECTORY in scheduler.proto. Entries are claims of whoever wrote them: here is decided which get a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.channel import Security, is_loopback
from paceline.scheduler.v1 import scheduler_pb2 as pb

DirectoryUse = Literal["off", "safe", "any"]
"""Which schedulers of a directory a client uses: see `KnownSchedulers`."""

LOOK_EVERY_S = 10.0
"""Time between two looks into a directory, while calls begin."""
NO_DIRECTORY_S = 300.0
"""The same after a scheduler has said that it has none."""
LOOK_TIMEOUT_S = 5.0
MAX_LEARNED = 1024
"""Schedulers that a client learns of, at most."""
MAX_LOOK_BYTES = 16 << 20
"""Of one look's answer."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A scheduler of a directory."""

    address: str
    instance: str
    tls_name: str
    model_fingerprint: bytes
    load: int  # running and waiting sequences
    drains: bool


class KnownSchedulers:
    """The addresses given by the user, which stay, and those learned from the directories of schedulers.

    A learned address is used only for the same model as that of the scheduler which told of it. With "safe"
    it is used over TLS, by the authority that the client trusts already and under the name that the entry
    gives; or without TLS on loopback, from a loopback address. With "any" also without TLS elsewhere, if the
    client has no authority. A scheduler is known once, however many addresses it has.
    """

    def __init__(self, given: Sequence[str], security: Security, use: DirectoryUse) -> None:
        self.given = tuple(given)
        self._security, self._use = security, use
        self._views: dict[str, tuple[Learned, ...]] = {}  # by the address of the scheduler that told of them
        self._instances: dict[str, str] = {}  # by given address
        self._liars: set[str] = set()
        self._learned: dict[str, Learned] = {}
        self._next_look = 0.0 if use != "off" else float("inf")

    def is_time_to_look(self, now: float) -> bool:
        """Whether it is time for a look into a directory; if so, the time of the next one is set."""
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_EVERY_S
        return True

    def saw(self, teller: str, entries: Iterable[pb.SchedulerEntry]) -> None:
        """Record all entries of the directory of the scheduler at `teller`."""
        listed = list(entries)
        own = next((entry for entry in listed if not entry.written_by), None)
        if own is None:
            return
        if teller in self.given:
            self._instances[teller] = own.instance
        same = (
            entry
            for entry in sorted(listed, key=lambda entry: entry.address)
            if (entry.model, entry.model_fingerprint) == (own.model, own.model_fingerprint)
            and entry.model_fingerprint
            and entry.instance != own.instance
            and self._may_get_a_token(entry, teller)
        )
        self._views[teller] = tuple(
            Learned(
                entry.address,
                entry.instance,
                entry.tls_name,
                entry.model_fingerprint,
                entry.load.running + entry.load.waiting,
                entry.state == pb.SCHEDULER_STATE_DRAINING,
            )
            for entry in same
        )
        self._join()

    def lost(self, teller: str) -> None:
        """Record that the directory of `teller` could not be had: what it told is kept if it is all."""
        if len(self._views) > 1:
            self._views.pop(teller, None)
            self._join()

    def has_none(self, teller: str, now: float) -> None:
        """Record that the scheduler at `teller` has no directory."""
        self._views.pop(teller, None)
        self._next_look = now + NO_DIRECTORY_S
        self._join()

    def distrust(self, address: str) -> None:
        """Record that what is at a learned address is not what its entry says: it is used no more."""
        if address in self._learned:
            self._liars.add(address)
            self._join()

    @property
    def addresses(self) -> tuple[str, ...]:
        """All that are used: the given ones, then the learned ones."""
        return (*self.given, *self._learned)

    @property
    def loads(self) -> dict[str, int]:
        """Sequences of the learned ones."""
        return {address: one.load for address, one in self._learned.items()}

    @property
    def draining(self) -> frozenset[str]:
        """Learned ones that take no new requests."""
        return frozenset(address for address, one in self._learned.items() if one.drains)

    def security(self, address: str) -> Security:
        """Of the channel to an address."""
        one = self._learned.get(address)
        return self._security if one is None else replace(self._security, server_name=one.tls_name)

    def is_what_it_says(self, address: str, model_fingerprint: bytes) -> bool:
        """Whether a scheduler that reports this model may be the one of the entry; given ones always are."""
        one = self._learned.get(address)
        return one is None or one.model_fingerprint == model_fingerprint

    def _may_get_a_token(self, entry: pb.SchedulerEntry, teller: str) -> bool:
        if self._security.ca_file is not None:
            return bool(entry.tls_name)
        if entry.tls_name:
            return False  # it speaks TLS, and the client knows no authority
        if is_loopback(entry.address):
            return is_loopback(teller)
        return self._use == "any"

    def _join(self) -> None:
        """Join what all have told: a scheduler is known while one of them lists it."""
        known = set(self._instances.values())
        joined: dict[str, Learned] = {}
        for one in sorted(
            (one for view in self._views.values() for one in view), key=lambda one: one.address
        ):
            if one.address in self.given or one.address in self._liars or len(joined) == MAX_LEARNED:
                continue
            if one.address in joined or one.instance not in known:
                joined.setdefault(one.address, one)
                known.add(one.instance)
        self._learned = joined
