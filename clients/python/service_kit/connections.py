"""Who holds the connections of a service's ports, and which of them are reset when memory rises.

gRPC bounds the headers of a call (16 KiB) only once the caller has confirmed the server's settings. A hostile
caller never does, and until then one call may have headers of 16 MiB, which 400 KB of references to HPACK's
table spell as hundreds of thousands of entries. None of gRPC's options changes that, and Python first sees a
call when all of its headers are parsed. So a thread looks at the process's memory, and while it rises, resets
the connections of strangers that send. A stranger is a connection of which no call was admitted yet.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from service_kit import sockets
from service_kit.logs import Log
from service_kit.sockets import Connection

log = Log(__name__)

LOOK_S = 0.03
"""Between two looks at the memory; HURRY_S while it rises."""
HURRY_S = 0.01
CENSUS_S = 5.0
"""Between two looks at all connections while the memory is calm."""
COUNT_S = 0.1
"""Between two counts of the descriptors, which show that connections to small ports came."""
RISE_BYTES = 32 << 20
"""Rise of the resident memory above its calm level at which strangers that send are looked for."""
CALM_BYTES_PER_S = 8 << 20
"""The calm level follows the resident memory at this speed upwards, and at once downwards."""
SENT_BYTES = 24 << 10
"""A stranger sends that has sent more than this since the last look, or of which more is unread: the largest
headers are 16 KiB. Of 200 that send, each is read so slowly that its share between two looks is less."""
SUSPECT_S = 0.02
"""For which a stranger must have sent before it is reset, counted from a turn of the event loop after it
began: its first calls may be waiting for their handlers."""
ALARM_S = 1.0
"""After a reset or a call with impossible headers, for which strangers that send are reset at once."""
SCARCE = 0.05
"""Fraction of the memory: with less available, strangers are reset whether they send or not."""
FULL = 0.75
"""Fraction of a port's connections above which strangers that stay longer than CENSUS_S are reset."""
TRIMS_S = (1.0, 5.0, 25.0)
"""After the last reset, and at most once in REST_S after a rise without one, freed memory is given back."""
REST_S = 60.0
LOG_S = 10.0


class Connections:
    """The connections of one service, all of its ports together.

    Its gates call `admit`, `answer` and `accuse` in the event loop; what has no public name is the
    thread's.
    """

    def __init__(self, source: Any = sockets) -> None:
        """`source`: of connections and memory; the module `sockets`."""
        self._source = source
        self._ports: dict[int, int] = {}  # port -> most connections
        self._small: set[int] = set()  # ports whose calls are small
        self._admitted: set[str] = set()
        self._answered: set[str] = set()
        self._known_before: set[str] = set()  # of both kinds, at the last census
        self._used: dict[str, float] = {}  # peer of a small port -> when its last request was complete
        self._watchers: Counter[str] = Counter()  # peer of a small port -> its calls that last
        self._seen: dict[str, float] = {}  # peer of a small port -> since when it is connected
        self._descriptors = self._room = 0  # open at the last look at the small ports; further ones that fit
        self._count_at = self._list_at = 0.0
        self._accused: set[str] = set()
        self._received: dict[str, int] = {}  # peer -> bytes at the last look
        self._suspects: dict[str, float] = {}  # peer -> since when it sends under pressure
        self._calm = self._last = self._alarm_until = self._census_at = 0.0
        self._beat_at = 0.0  # when the event loop had a turn for which the thread asked
        self._asked_at = self._rested_at = 0.0
        self._trims: list[float] = []
        self._resets: Counter[str] = Counter()  # not yet logged, by the reason
        self._log_at = 0.0
        self._wake = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def watch(self, port: int, most: int, *, small: bool = False) -> None:
        """Watch a port that takes `most` connections. Called in the event loop that admits its calls.

        `small`: no honest call there has more than a few bytes, so that who sends much while memory rises is
        reset, admitted or not. Its server takes more than `most`: whoever is longest without a complete
        request is reset for the newcomers.
        """
        self._ports[port] = most
        if small:
            self._small.add(port)
        self._loop = asyncio.get_running_loop()
        if not self._source.AVAILABLE:
            log.warning("floods of headers are not bounded: this system shows no process its sockets")
        elif self._thread is None:
            self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
            self._thread.start()

    def admit(self, peer: str) -> None:
        """A call of this peer has valid credentials: it is no stranger from now on."""
        if peer not in self._admitted:
            self._admitted.add(peer)

    def answer(self, peer: str) -> None:
        """A stranger's health check is answered: its connection is of use, though not to be trusted."""
        if peer not in self._answered:
            self._answered.add(peer)

    @contextmanager
    def request(self, peer: str) -> Iterator[None]:
        """A complete request came from this peer of a small port; its call lasts as long as the context."""
        self._used[peer] = time.monotonic()
        self._watchers[peer] += 1
        try:
            yield
        finally:
            self._used[peer] = time.monotonic()
            self._watchers[peer] -= 1
            if not self._watchers[peer]:
                del self._watchers[peer]

    def accuse(self, peer: str) -> None:
        """This peer sent what no honest client can send; its connection is reset."""
        self._accused.add(peer)
        self._wake.set()

    def _run(self) -> None:
        """Look and wait, forever: the function of the thread."""
        while True:
            began = time.monotonic()
            try:
                wait_s = max(self.look(began), time.monotonic() - began)
            except Exception as error:
                log.error("connections are not watched for a second", error)
                wait_s = 1.0
            self._wake.wait(wait_s)
            self._wake.clear()

    def look(self, now: float) -> float:
        """Reset what has to be reset. Returns the seconds until the next look."""
        resident = self._source.resident_bytes()
        grown = CALM_BYTES_PER_S * (now - self._last) if self._last else resident
        self._calm, self._last = min(resident, self._calm + grown), now
        if self._small and now >= self._count_at:
            self._make_room(now)
        if self._accused:
            self._alarm_until = now + ALARM_S
        alarm = now < self._alarm_until
        if alarm or resident > self._calm + RISE_BYTES:
            if now >= self._rested_at:
                self._trims, self._rested_at = [now + after for after in TRIMS_S], now + REST_S
            if not self._relieve(self._source.connections(self._ports), now, alarm=alarm):
                self._calm = resident  # strangers are not the reason
        else:
            self._suspects = {}
            if now >= self._census_at:
                self._count(self._source.connections(self._ports), now)
        self._give_back(now)
        return HURRY_S if alarm or self._suspects else LOOK_S

    def _make_room(self, now: float) -> None:
        """At small ports with too many connections, reset those that are longest without a complete request.

        Those with an open call come last. Connections are listed if there may be more than fit, and every
        CENSUS_S.
        """
        self._count_at = now + COUNT_S
        descriptors = self._source.descriptors()
        if descriptors <= self._descriptors + self._room and now < self._list_at:
            self._descriptors = min(descriptors, self._descriptors)
            return
        self._list_at = now + CENSUS_S
        found = [one for one in self._source.connections(self._ports) if one.port in self._small]
        self._seen = {one.peer: self._seen.get(one.peer, now) for one in found}
        for peer in self._used.keys() - self._seen.keys():
            self._used.pop(peer, None)
        rooms, surplus = [], []
        for port in self._small:
            held = [one for one in found if one.port == port]
            rooms.append(max(0, self._ports[port] - len(held)))
            held.sort(key=self._last_use)
            surplus += held[: max(0, len(held) - self._ports[port])]
        self._descriptors, self._room = descriptors - len(surplus), min(rooms)
        self._reset(surplus, now, "a port has too many connections: the longest without a call are closed")

    def _last_use(self, one: Connection) -> tuple[bool, float]:
        return one.peer in self._watchers, self._used.get(one.peer, self._seen[one.peer])

    def _relieve(self, found: list[Connection], now: float, *, alarm: bool) -> bool:
        """Reset strangers that send. Returns False if there is none."""
        scarce = self._source.scarce_memory(SCARCE)
        before, self._received = self._received, {one.peer: one.received for one in found}
        suspects, resets = {}, []
        for one in found:
            if one.peer in self._accused:
                resets.append(one)
            elif one.peer not in self._admitted or one.port in self._small:
                sends = max(one.unread, one.received - before.get(one.peer, 0)) > SENT_BYTES
                since = self._suspects.get(one.peer, now)
                useless = scarce and one.peer not in self._admitted
                if useless or (sends and alarm) or since <= self._beat_at <= now - SUSPECT_S:
                    resets.append(one)
                elif sends or one.peer in self._suspects:
                    suspects[one.peer] = since
        self._accused.clear()
        self._suspects = suspects
        if suspects and self._beat_at >= self._asked_at:
            self._asked_at = now
            self._ask_for_a_turn()
        if resets:
            self._alarm_until = now + ALARM_S
        self._reset(resets, now, "memory rose: strangers that send are disconnected")
        return bool(suspects or resets)

    def _ask_for_a_turn(self) -> None:
        """Have the event loop note its next turn: by then it could have admitted a suspect's first calls."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it was closed
                self._loop.call_soon_threadsafe(self._beat)

    def _beat(self) -> None:
        """Note that the event loop has a turn now."""
        self._beat_at = time.monotonic()

    def _count(self, found: list[Connection], now: float) -> None:
        """Forget who has left; at a port that is nearly full, reset strangers that were here before."""
        self._census_at = now + CENSUS_S
        before, self._received = self._received, {one.peer: one.received for one in found}
        left = self._known_before - self._received.keys()
        self._admitted -= left
        self._answered -= left
        known = self._known_before = self._admitted | self._answered
        held = Counter(one.port for one in found)
        full = {port for port, most in self._ports.items() if held[port] > FULL * most}
        strangers = (
            one for one in found if one.port in full and one.peer in before and one.peer not in known
        )
        self._reset(strangers, now, "a port is nearly full: connections without a call are closed")

    def _reset(self, chosen: Iterable[Connection], now: float, why: str) -> None:
        """Reset connections, log how many at most every LOG_S, and plan when freed memory is given back."""
        if done := sum(self._source.reset(one) for one in chosen):
            self._resets[why] += done
            due = [at for at in self._trims[:1] if at < now + TRIMS_S[0]]  # also while a flood goes on
            self._trims = due + [now + after for after in TRIMS_S]
        if self._resets and now >= self._log_at:
            for reason, count in self._resets.items():
                log.warning(reason, connections=count, resident_mib=round(self._calm / 2**20))
            self._resets.clear()
            self._log_at = now + LOG_S

    def _give_back(self, now: float) -> None:
        """Give freed memory back to the system, if the time has come."""
        if self._trims and now >= self._trims[0]:
            self._trims.pop(0)
            self._source.give_back_memory()
