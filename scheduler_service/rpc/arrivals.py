"""Calls whose messages are not read yet. Callers take turns, and taking further calls has priority.

Accepting a call from gRPC costs the event loop 0.1 ms; reading its message and then admitting or refusing it
costs several times that. gRPC hands calls over one by one in the order of their arrival, whichever caller
they are from. So while calls keep arriving, only a few of each caller are processed and the others wait: a
call after thousands of another caller's is delayed by accepting those, but not by processing them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

AT_ONCE = 4
"""Calls of one caller that start at once between two rounds; also calls of all callers started in a round."""
QUIET_TURNS = 3
"""A round starts after this many iterations of the event loop without a new call."""
MAX_TURNS = 64
"""A round starts after this many iterations of the event loop, even if calls keep arriving."""
REFUSALS_PER_S = 1000.0
"""Rate at which calls of a caller are refused that is alone; further refusals are delayed."""
CONTESTED_REFUSALS_PER_S = 250.0
"""The same while other callers have requests: at 1,000 per second, accepting the next calls of a client that
retries at once delays everybody's by 80 ms."""
REFUSALS_AT_ONCE = 200
"""Refusals of one caller that may exceed the rate (the burst)."""
MAX_REFUSED_CALLERS = 1024
"""Number of callers from which on those without a delayed refusal are forgotten."""


class ArrivalQueue:
    """Starts calls: those of one caller in their order, the callers in turn.

    It does not wait for started calls to end, so a slow call delays no other.
    """

    def __init__(self) -> None:
        # by caller; the next caller is first
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._begun: Counter[str] = Counter()  # by caller, since the last round
        self._turns = 0  # of the event loop since the last round
        self._quiet = 0  # of these, the last ones in which no call arrived
        self._is_watching = False

    def __len__(self) -> int:
        """Calls that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    async def turn(self, caller: str) -> bool:
        """Wait for a call's turn. Returns whether it had to wait, because its caller has sent many at once.

        A call whose task is cancelled here is forgotten.
        """
        self._quiet = 0
        if not self._is_watching:
            self._is_watching = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        if caller not in self._waiting and self._begun[caller] < AT_ONCE:
            self._begun[caller] += 1
            return False
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(future)
        await future
        return True

    def _next_turn(self) -> None:
        """Runs once per iteration of the event loop while calls wait."""
        self._turns += 1
        self._quiet += 1
        if self._quiet >= QUIET_TURNS or self._turns >= MAX_TURNS:
            self._turns = 0
            self._begun.clear()
            self._begin_some()
        self._is_watching = bool(self._waiting or self._begun)
        if self._is_watching:
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _begin_some(self) -> None:
        left = AT_ONCE
        while left and self._waiting:
            caller, calls = next(iter(self._waiting.items()))
            call = calls.popleft()
            if not calls:
                del self._waiting[caller]
            if call.done():  # its client has left
                continue
            if calls:
                self._waiting.move_to_end(caller)
            call.set_result(None)
            self._begun[caller] += 1
            left -= 1


class RefusalPace:
    """Limits the rate of each caller's refusals, after a burst of REFUSALS_AT_ONCE.

    A refusal costs 0.2 ms, so a client that retries at once could keep the event loop busy. A delayed call
    counts towards its connection's limit of concurrent calls, which stops such a client.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[str, float] = {}  # by caller: when the next refusal is due, without the burst

    def delay_s(self, caller: str, *, contested: bool) -> float:
        """Count one refusal of the caller; returns the seconds by which to delay it."""
        now = self._clock()
        if len(self._due) >= MAX_REFUSED_CALLERS:
            self._due = {name: due for name, due in self._due.items() if due > now}
        interval_s = 1 / (CONTESTED_REFUSALS_PER_S if contested else REFUSALS_PER_S)
        due = max(self._due.get(caller, now), now)
        self._due[caller] = due + interval_s
        return max(0.0, due - now - REFUSALS_AT_ONCE * interval_s)
