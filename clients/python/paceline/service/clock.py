"""Time in which this process was really running, for whoever judges others by their silence."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RunningClock:
    """Seconds that the process was really running.

    Whoever reads it also moves it on, by the time since the last reading but never by more than
    `cap_s`: a process that was stopped for an hour comes back with its leases and patience `cap_s`
    older. It has to be read several times in each `cap_s`. Any thread may read it.
    """

    def __init__(self, now: Callable[[], float], cap_s: float = 1.0) -> None:
        self._now, self._cap_s = now, cap_s
        self._last_s, self._elapsed_s = now(), 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """The time by now, in seconds since the clock was made."""
        with self._lock:
            now = self._now()
            self._elapsed_s += min(now - self._last_s, self._cap_s)
            self._last_s = now
            return self._elapsed_s
