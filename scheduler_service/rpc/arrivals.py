"""Calls that have arrived and whose messages were not read yet: callers take turns, and arrivals come first.

Taking a call from gRPC costs the event loop 0.1 ms; reading its message, checking and admitting or refusing
it costs several times that. gRPC hands calls over one by one in the order of their arrival, whoever made
them. While calls arrive, all but a few of each caller wait: a call behind thousands of another caller's is
delayed by taking those, and not by what is done for them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

AT_ONCE = 4
"""Calls of one caller that begin without waiting, and calls of all that begin in one round."""
QUIET_TURNS = 3
"""Turns of the event loop in which no call has arrived, before the next round."""
MAX_TURNS = 64
"""Between two rounds, however many calls arrive."""
REFUSALS_PER_S = 1000.0
"""Of one caller; further ones wait."""
REFUSALS_AT_ONCE = 200
MAX_REFUSED_CALLERS = 1024
"""Whose pace is remembered before those that have none left are forgotten."""


class ArrivalQueue:
    """Lets calls begin: those of one caller in their order, the callers in turn.

    It waits for nothing but the event loop: a call that has begun and is slow holds up no other.
    """

    def __init__(self) -> None:
        # by caller; who is next stands first
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._begun: Counter[str] = Counter()  # by caller, since the last round
        self._turns = 0  # of the event loop since the last round
        self._quiet = 0  # of these, the last ones in which no call arrived
        self._is_watching = False

    async def turn(self, caller: str) -> bool:
        """Wait for the call's turn. Raises CancelledError, and then the call is forgotten.

        True if it had to wait: its caller has sent many at once.
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
        """Of the event loop."""
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
    """Answers a caller's refused calls at REFUSALS_PER_S, after REFUSALS_AT_ONCE at once.

    A refusal costs a fifth of a millisecond, and a client that sends its next call upon it could keep the
    event loop busy with nothing else. The call that waits counts among its connection's calls, of which
    there may be so many: its client can't send the next one before.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[str, float] = {}  # by caller: when the next refusal is due, were none sent at once

    def delay_s(self, caller: str) -> float:
        """Seconds that a refusal of now has to wait; it is counted."""
        now = self._clock()
        if len(self._due) >= MAX_REFUSED_CALLERS:
            self._due = {name: due for name, due in self._due.items() if due > now}
        due = max(self._due.get(caller, now), now)
        self._due[caller] = due + 1 / REFUSALS_PER_S
        return max(0.0, due - now - REFUSALS_AT_ONCE / REFUSALS_PER_S)
