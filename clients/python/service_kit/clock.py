"""A clock that stands still while its process is stopped, for timeouts on other processes' answers."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RunningClock:
    """Seconds for which the process has been running, without the time in which it was stopped.

    Each reading advances the clock by the time since the last reading, but by at most `cap_s`: after a stop
    of an hour, leases and timeouts have aged by `cap_s`. The clock is right only if it is read several times
    in each `cap_s`. Any thread may read it.
    """

    def __init__(self, now: Callable[[], float], cap_s: float = 1.0) -> None:
        self._now, self._cap_s = now, cap_s
        self._last_s, self._elapsed_s = now(), 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Seconds since the clock was made, without the time in which the process was stopped."""
        with self._lock:
            now = self._now()
            self._elapsed_s += min(now - self._last_s, self._cap_s)
            self._last_s = now
            return self._elapsed_s
