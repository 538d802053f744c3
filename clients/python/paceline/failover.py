"""Chooses the scheduler of each attempt of a call, after refusals and losses too. Time is passed in.

Shared by the blocking and the asyncio client, which send, wait and read the clock. Times are seconds of
that clock.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TypeGuard

from paceline.affinity import first_choice, preference
from paceline.call_spans import NO_SPAN, CallSpan
from paceline.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    NotFound,
    PacelineError,
    RetryLater,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from paceline.names import check_address

FAILOVER_TIMEOUT_S = 30.0
"""Default time after the loss of a call's scheduler in which the call is sent again, and of a call's wait for
a model that is loading."""

MIN_DOWN_S, MAX_DOWN_S = 1.0, 8.0
"""Time for which an address that could not be reached is tried last; doubles with each further failure."""
MAX_TRIED = 64
"""Addresses that a call tries in one round, the first ones of its order. A call without a key begins each
round with the next address, so that others come in; one with a key stays with those that its key prefers."""
TRIED_BEFORE_GIVEN = 8
"""Learned addresses that a call tries before a given one, at most: many dead entries hold nobody up."""
MIN_WAIT_S, MAX_WAIT_S = 0.1, 1.0
"""Wait between two rounds through all addresses; doubles each round, unless a scheduler gives a hint."""
MAX_LOSSES = 4
"""Losses in a row, with nothing received between them, that end a call: the call may be their cause."""
MAX_TRIES_OF_A_NAME = 8
"""Tries of a call at a name of several schedulers, where some take no requests, for example while they drain.

The channel chooses the scheduler of each try, in turn among all calls: a call may meet the same one again.
"""

WAIT_KEY = "paceline-wait-ms"
"""Metadata of a call: milliseconds for which it waits at the scheduler while a model is loading."""
MODEL_KEY = "paceline-model"
"""Metadata of a call: the model that it means, where one address has several (docs/several-models.md)."""
_NOT_READY = "NOT_READY"

_NO_ADAPTERS: Mapping[str, Collection[str]] = MappingProxyType({})
_NO_MODELS: Mapping[str, bytes] = MappingProxyType({})

_NEVER_REACHED = (
    *("failed to connect", "connections to all backends failing"),
    *("DNS resolution failed", "errors resolving"),
)
"""In the errors of gRPC for calls that no scheduler got, of older and newer versions."""


def addresses_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """The distinct addresses of a sequence or comma-separated string.

    Raises ValueError if there is none, for a URL and for a host without a port.
    """
    parts = given.split(",") if isinstance(given, str) else given
    found = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    for address in found:
        check_address(address)
    if not found:
        raise ValueError("no address is given")
    return found


_log = logging.getLogger("paceline")
"""INFO: a call that has lost its scheduler waits for one that goes on with it."""


class Rotation:
    """The order in which the calls of a client try its addresses.

    A call with a key begins where that key's prompts are cached, unless the client has too many live calls
    there (AFFINITY in scheduler.proto); one without begins with the next address in turn. Addresses marked as
    down come last. `extra_streams`: of `aio.Client`.
    """

    def __init__(self, addresses: Sequence[str], extra_streams: int = 0) -> None:
        self.given = frozenset(addresses)
        self._addresses, self._extra_streams = tuple(addresses), extra_streams
        self._known = self.given
        self._next = 0
        self._live: Counter[str] = Counter()  # calls
        self._counting = threading.Lock()  # they end in threads of gRPC
        self._loads: Mapping[str, int] = {}  # as the directory tells them
        self._draining: Collection[str] = ()
        self._adapters: Mapping[str, Collection[str]] = {}
        self._models: Mapping[str, bytes] = {}  # fingerprints, of those that are known to have one
        self._foreign: Collection[str] = ()
        self._down: dict[str, tuple[float, float]] = {}  # address: (end of its down time, that time's length)

    def use(
        self,
        addresses: Sequence[str],
        loads: Mapping[str, int],
        draining: Collection[str],
        adapters: Mapping[str, Collection[str]] = _NO_ADAPTERS,
        models: Mapping[str, bytes] = _NO_MODELS,
        foreign: Collection[str] = (),
    ) -> None:
        """Calls that begin from now on try these addresses.

        `loads`: sequences that run or wait there, of all clients. Those that drain come last. `adapters`: of
        those addresses that are known to have some. `models`: fingerprints; `foreign`: those of another model
        than the present one, for new calls that none of the others takes.
        """
        self._models, self._foreign = models, foreign
        self._addresses, self._loads, self._draining = tuple(addresses), loads, draining
        self._adapters, self._known = adapters, frozenset(addresses)
        self._down = {one: down for one, down in list(self._down.items()) if one in self._known}

    def has(self, address: str) -> bool:
        """Whether the address is still one of them."""
        return address in self._known

    def is_foreign(self, address: str) -> bool:
        """Whether it has another model than the present one."""
        return address in self._foreign

    def is_idle(self, address: str) -> bool:
        """Whether no call is at this address."""
        return not self._live.get(address)

    def model_at(self, address: str) -> bytes:
        """The fingerprint of the model there; empty: not known."""
        return self._models.get(address, b"")

    def order(self, now: float, key: bytes = b"", model: str = "", begun_with: bytes = b"") -> list[str]:
        """The addresses that a call should try, in their order: all, up to MAX_TRIED.

        `key`: of `affinity_key`. `model`: what the request names; those that have an adapter of this name
        come before those that have not. `begun_with`: the fingerprint of a stream's model, which alone can
        continue it. Other calls try `foreign` addresses where all others are down or drain.
        """
        addresses, draining = self._addresses, self._draining
        if begun_with:
            same = tuple(one for one in addresses if self._models.get(one, begun_with) == begun_with)
            addresses = same or addresses
        elif self._foreign:
            present = tuple(one for one in addresses if one not in self._foreign)
            taken = any(not self.is_down(one, now) and one not in draining for one in present)
            addresses = present if taken else addresses
        holders = {one for one in addresses if model in self._adapters.get(one, ())} or self._known
        if key and len(addresses) > 1:
            preferred = preference(key, addresses)
            takers = [one for one in preferred if one in holders and one not in draining] or preferred
            live = {address: self._live.get(address, 0) for address in takers}
            loads = {address: self._loads.get(address, 0) for address in takers}
            first = first_choice(takers, live, loads, self._extra_streams)
            turn = [first, *(address for address in preferred if address != first)]
        else:
            begin = self._next % len(addresses)
            turn = [*addresses[begin:], *addresses[:begin]]
            self._next = begin + 1
        turn.sort(key=lambda one: (self.is_down(one, now), one in draining, one not in holders))
        given = next((place for place, one in enumerate(turn) if one in self.given), 0)
        turn.insert(min(given, TRIED_BEFORE_GIVEN), turn.pop(given))
        return turn[:MAX_TRIED]

    def began(self, address: str) -> None:
        """Count a call at this address."""
        with self._counting:
            self._live[address] += 1

    def ended(self, address: str) -> None:
        """Count it no more."""
        with self._counting:
            self._live[address] -= 1
            if not self._live[address]:
                del self._live[address]

    def up(self, address: str) -> None:
        """Mark an address that has answered as usable."""
        self._down.pop(address, None)

    def down(self, address: str, now: float) -> None:
        """Mark an address that could not be reached, or takes no requests, as down for a while.

        Ignored while the address is down already, so that concurrent calls count as one failure.
        """
        if self.is_down(address, now):
            return
        _, last_s = self._down.get(address, (0.0, 0.0))
        for_s = min(max(2 * last_s, MIN_DOWN_S), MAX_DOWN_S)
        self._down[address] = (now + for_s, for_s)

    def is_down(self, address: str, now: float) -> bool:
        """Whether the address could not be reached a short while ago."""
        return self._down.get(address, (now, 0.0))[0] > now


class Attempts:
    """The attempts of one call. `address` is the current attempt's.

    A refused attempt (by the scheduler, or because it can't be reached) moves on to the next address, after
    further schedulers of the same one if it is a name of several; when all have refused, the error is the
    caller's. But if one of them has no executor yet, because a model is loading, the call is sent there once
    more, and waits there for up to `load_wait_s`: `metadata` says so. A lost attempt (the connection broke,
    or the scheduler ended the call with UNAVAILABLE in mid-stream) is repeated at once on each other address,
    and then on all of them for up to `failover_timeout_s`.
    """

    def __init__(
        self,
        rotation: Rotation,
        now: float,
        *,
        timeout_s: float | None,
        failover_timeout_s: float,
        load_wait_s: float = 0.0,
        key: bytes = b"",
        model: str = "",
        call: str = "the call",
        span: CallSpan = NO_SPAN,
    ) -> None:
        """`key`: of `affinity_key`; empty: the call begins with the next address in turn.

        `model`: what the request names. `call`: the method's name, for the error at the deadline.
        """
        self._rotation, self._key, self._model, self.span = rotation, key, model, span
        self._call, self._timeout_s = call, timeout_s
        self._deadline = None if timeout_s is None else now + timeout_s
        self._failover_timeout_s = failover_timeout_s
        self._untried = rotation.order(now, key, model)
        self._answered = False  # whether the current attempt received a message
        self._refusals: list[RetryLater] = []  # in this round through the addresses
        self._refusals_here = 0  # in a row, by schedulers of the current address
        self._lost_at: float | None = None  # time of the last loss after a message, else of the first loss
        self._losses = 0  # in a row, since the last message
        self._wait_s = MIN_WAIT_S
        self._load_wait_s = load_wait_s
        self._begun_with = b""  # the fingerprint of the model that has sent something
        self._gone_over = False  # whether foreign ones were tried
        self._loads: str | None = None  # address of a scheduler that had no executor yet
        self.address = self._untried.pop(0)
        self.metadata: tuple[tuple[str, str], ...] = ()
        """What the current attempt says in addition: that it waits for a model that is loading."""

    def sent(self, metadata: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """All metadata of the current attempt. metadata: the client's."""
        return self.span.carried((*metadata, *self.metadata), self.address)

    def timeout_s(self, now: float) -> float | None:
        """The rest of the caller's `timeout_s`; None: no deadline. Raises DeadlineExceeded at its end."""
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise self._late(DeadlineExceeded(""))
        return self._deadline - now

    def skip(self, now: float) -> None:
        """Set `address` to another one: the directory has the current one no more."""
        self._untried = self._still_known() or self._order(now)
        self.address = self._untried.pop(0)

    def _order(self, now: float) -> list[str]:
        return self._rotation.order(now, self._key, self._model, self._begun_with)

    def _still_known(self) -> list[str]:
        return [one for one in self._untried if self._rotation.has(one)]

    def answered(self, model: bytes = b"") -> None:
        """Record that the current attempt received a message. `model`: the fingerprint that it tells."""
        if not self._answered:
            self._answered = True
            self._rotation.up(self.address)
            self._begun_with = model or self._rotation.model_at(self.address)

    def failed(self, error: PacelineError, now: float, schedulers: int = 1) -> float:
        """Record that the current attempt failed, and set `address` to the next attempt's.

        Returns the seconds to wait before that attempt. If there is to be none, raises the error that
        the caller gets: `error`, or an earlier refusal. Any other error is the caller's at once, as is a
        refusal after a message; but a DuplicateRequest after a loss means that the lost attempt still runs,
        and counts as a loss. `schedulers`: how many the current address stands for. What a learned scheduler
        does not know or let in, a given one decides.
        """
        known = self._rotation.has(self.address)
        if known and self._is_refusal(error) and self._refusals_here + 1 < _tries(error, schedulers):
            self._refusals_here += 1
            self._refusals.append(error)
            return 0.0
        self._refusals_here = 0
        if isinstance(error, Unavailable):
            self._rotation.down(self.address, now)
        if self._is_lost(error):
            self._lose(error, now)
        elif self._lost_at is not None and isinstance(error, DuplicateRequest):
            pass  # the duplicate is our lost attempt, which its scheduler still runs
        elif self._is_refusal(error):
            self._refusals.append(error)
            if error.reason == _NOT_READY and self._loads is None:
                self._loads = self.address
        elif self._is_no_last_word(error):
            self._untried.sort(key=lambda address: address not in self._rotation.given)
        else:
            raise self._late(error) if isinstance(error, DeadlineExceeded) else error
        self._answered = False
        self._untried = self._still_known()
        if not self._untried and not self._gone_over:  # all others are down or drain
            self._gone_over = True
            self._untried = [one for one in self._order(now) if self._rotation.is_foreign(one)]
        if self._untried:
            self.address = self._untried.pop(0)
            return 0.0
        return self._next_round(error, now)

    def _late(self, error: DeadlineExceeded) -> DeadlineExceeded:
        """The error with the call and the time that it had, and what a service says of the cause."""
        if self._timeout_s is None:
            return error
        call = self._call.replace("GenerateUnary", "generation")
        text = f"{call} did not end within its timeout_s of {self._timeout_s:g} s"
        said = f": {error.message}" if error.reason else ""
        return DeadlineExceeded(text + said, code=error.code, reason=error.reason, metadata=error.metadata)

    def _is_refusal(self, error: PacelineError) -> TypeGuard[RetryLater]:
        """Whether the call was certainly not accepted, and may be by another scheduler."""
        return isinstance(error, RetryLater) and not self._answered and not self._is_lost(error)

    def _is_no_last_word(self, error: PacelineError) -> bool:
        """Whether a learned scheduler refused what a given one may take."""
        learned = self.address not in self._rotation.given
        return learned and not self._answered and isinstance(error, NotFound | Unauthenticated | Unsupported)

    def _is_lost(self, error: PacelineError) -> bool:
        """Whether the connection broke, or the scheduler ended, when it may have accepted the call.

        Always an Unavailable: after a message, or made by gRPC on a connection that had been established.
        """
        if not isinstance(error, Unavailable):
            return False
        by_grpc = not error.reason and error.retry_after_s is None
        return self._answered or (by_grpc and not any(text in error.message for text in _NEVER_REACHED))

    def _lose(self, error: PacelineError, now: float) -> None:
        """Count a loss. Raises `error` at MAX_LOSSES.

        The first loss, and each after a message, begins a new round with the other addresses.
        """
        self._losses = 1 if self._answered else self._losses + 1
        if self._losses >= MAX_LOSSES:
            raise error
        if self._answered or self._lost_at is None:
            self._lost_at, self._wait_s, self._refusals = now, MIN_WAIT_S, []
            order = self._order(now)
            self._untried = [other for other in order if other != self.address]

    def _next_round(self, error: PacelineError, now: float) -> float:
        """Begin another round after a loss; the seconds to wait before it. Raises if no time is left."""
        hints = [
            max(one.retry_after_s, MIN_WAIT_S) for one in self._refusals if one.retry_after_s is not None
        ]
        for_caller = min(self._refusals, key=_retry_after_s) if self._refusals else error
        if self._lost_at is None:
            waited = bool(self.metadata) or self._load_wait_s <= 0
            if waited or self._loads is None or not self._rotation.has(self._loads):
                raise for_caller
            self.address, self._refusals = self._loads, []
            self.metadata = ((WAIT_KEY, str(round(self._load_wait_s * 1000))),)
            return 0.0
        left_s = self._lost_at + self._failover_timeout_s - now
        if left_s <= 0:
            raise for_caller
        if self._wait_s == MIN_WAIT_S:  # the first round since the loss
            _log.info(
                "%s: the connection was lost, trying again for %.0f s (%s)", self.address, left_s, error
            )
        self._untried = self._order(now)
        self.address = self._untried.pop(0)
        wait_s = min(min(hints, default=self._wait_s), left_s)
        self._wait_s = min(2 * self._wait_s, MAX_WAIT_S)
        self._refusals = []
        return wait_s if self._deadline is None else min(wait_s, max(0.0, self._deadline - now))


def _tries(refusal: RetryLater, schedulers: int) -> int:
    """Tries of a call at an address that stands for several schedulers."""
    if schedulers == 1 or not isinstance(refusal, Unavailable):
        return schedulers  # a full queue is tried once for each: more tries would only add to the load
    return max(schedulers, MAX_TRIES_OF_A_NAME)


def _retry_after_s(error: RetryLater) -> float:
    return float("inf") if error.retry_after_s is None else error.retry_after_s
