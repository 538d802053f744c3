"""Which scheduler a call goes to, and where next when one refuses it or dies. Pure: time is passed in.

Shared by the blocking and the asyncio client, which send, wait and read the clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import DeadlineExceeded, DuplicateRequest, PacelineError, RetryLater, Unavailable

FAILOVER_TIMEOUT_S = 30.0
"""How long a call that lost its scheduler looks for another, by default."""

MIN_DOWN_S, MAX_DOWN_S = 1.0, 8.0
"""How long an address that could not be reached is tried last; doubles with each further failure."""
MIN_WAIT_S, MAX_WAIT_S = 0.1, 1.0
"""Between two rounds through all addresses; doubles each time, unless a scheduler says how long."""
MAX_LOSSES = 4
"""Attempts of a call that may be lost in a row with nothing received: it may itself be the cause."""

_NEVER_REACHED = ("failed to connect", "DNS resolution failed")


def addresses_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """One address, or several, in a sequence or in a string with commas. Raises ValueError for none."""
    parts = given.split(",") if isinstance(given, str) else given
    found = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not found:
        raise ValueError("no address is given")
    return found


class Rotation:
    """A client's addresses, by number: calls begin at each in turn, and try last those that are down."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0
        self._down: dict[int, tuple[float, float]] = {}  # until when, and for how long

    def order(self, now: float) -> list[int]:
        """All addresses, in the order in which a call should try them."""
        first = self._next
        self._next = (first + 1) % self._count
        turn = [(first + i) % self._count for i in range(self._count)]
        return sorted(turn, key=lambda address: self._is_down(address, now))

    def up(self, address: int) -> None:
        """It has answered."""
        self._down.pop(address, None)

    def down(self, address: int, now: float) -> None:
        """It could not be reached, or takes no requests. Of several calls that find out, the first counts."""
        if self._is_down(address, now):
            return
        _, last_s = self._down.get(address, (0.0, 0.0))
        for_s = min(max(2 * last_s, MIN_DOWN_S), MAX_DOWN_S)
        self._down[address] = (now + for_s, for_s)

    def _is_down(self, address: int, now: float) -> bool:
        return self._down.get(address, (now, 0.0))[0] > now


class Attempts:
    """One call's way through the addresses: `address` is where it is sent now.

    A refusal, by a scheduler or because it can't be reached, is the caller's once all addresses have
    refused. A call that was lost, because the connection broke under it or its scheduler ended it UNAVAILABLE
    in mid-stream, is sent again for up to `failover_timeout_s`.
    """

    def __init__(
        self, rotation: Rotation, now: float, *, timeout_s: float | None, failover_timeout_s: float
    ) -> None:
        self._rotation = rotation
        self._deadline = None if timeout_s is None else now + timeout_s
        self._failover_timeout_s = failover_timeout_s
        self._untried = rotation.order(now)
        self._answered = False  # this attempt
        self._refusals: list[RetryLater] = []  # of this round
        self._lost_at: float | None = None
        self._losses = 0  # since something was received
        self._wait_s = MIN_WAIT_S
        self.address = self._untried.pop(0)

    def timeout_s(self, now: float) -> float | None:
        """What is left of the caller's `timeout_s`. Raises DeadlineExceeded if nothing is."""
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise DeadlineExceeded("timeout_s went by")
        return self._deadline - now

    def answered(self) -> None:
        """A message has come from `address`."""
        if not self._answered:
            self._answered = True
            self._rotation.up(self.address)

    def failed(self, error: PacelineError, now: float) -> float:
        """The attempt has failed: seconds to wait before the call is sent to the new `address`.

        Raises the error for the caller if the call is not to be sent again: `error`, or an earlier refusal.
        """
        if isinstance(error, Unavailable):
            self._rotation.down(self.address, now)
        if self._is_lost(error):
            self._lose(error, now)
        elif self._lost_at is not None and isinstance(error, DuplicateRequest):
            pass  # the attempt before this one: its scheduler has not noticed yet that we are gone
        elif isinstance(error, RetryLater) and not self._answered:
            self._refusals.append(error)
        else:
            raise error
        self._answered = False
        if self._untried:
            self.address = self._untried.pop(0)
            return 0.0
        return self._next_round(error, now)

    def _is_lost(self, error: PacelineError) -> bool:
        """Whether the call had been taken, as far as one can tell, when it ended."""
        if not isinstance(error, Unavailable):
            return False
        by_grpc = not error.reason and error.retry_after_s is None
        return self._answered or (by_grpc and not any(text in error.message for text in _NEVER_REACHED))

    def _lose(self, error: PacelineError, now: float) -> None:
        self._losses = 1 if self._answered else self._losses + 1
        if self._losses >= MAX_LOSSES:
            raise error
        if self._answered or self._lost_at is None:
            self._lost_at, self._wait_s, self._refusals = now, MIN_WAIT_S, []
            self._untried = [other for other in self._rotation.order(now) if other != self.address]

    def _next_round(self, error: PacelineError, now: float) -> float:
        hints = [one.retry_after_s for one in self._refusals if one.retry_after_s is not None]
        worst = min(self._refusals, key=_soonest) if self._refusals else error
        if self._lost_at is None:
            raise worst
        left_s = self._lost_at + self._failover_timeout_s - now
        if left_s <= 0:
            raise worst
        self._untried = self._rotation.order(now)
        self.address = self._untried.pop(0)
        wait_s = min(min(hints, default=self._wait_s), left_s)
        self._wait_s = min(2 * self._wait_s, MAX_WAIT_S)
        self._refusals = []
        return wait_s if self._deadline is None else min(wait_s, max(0.0, self._deadline - now))


def _soonest(error: RetryLater) -> float:
    return float("inf") if error.retry_after_s is None else error.retry_after_s
