"""Whether a service process is frozen: a pure judgement of what was seen of it, and when."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_MIN_MISSES = 3  # probes without an answer, before silence means anything


class Activity(enum.Enum):
    """What a process's threads do, as the operating system tells."""

    STOPPED = "stopped by a signal"
    TRACED = "held by a debugger"
    BUSY = "busy"  # one computes, or waits for a disk
    IDLE = "idle"  # all wait
    UNKNOWN = "unknown"  # the system does not tell


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a process may give no answer before it counts as frozen, in seconds.

    Answers come from its event loop, which neither loading nor compiling nor a long step holds up. A
    stopped process is certain to be one, an idle one nearly so. A busy one may have a reason: a long
    computation that holds the interpreter, or a machine that is overloaded. One that has not answered
    yet is still importing.
    """

    stopped_s: float = 4.0
    idle_s: float = 10.0
    busy_s: float = 30.0
    starting_s: float = 300.0


class Pulse:
    """One life of one process. Times are readings of a clock that stands still while its reader does."""

    def __init__(self, now: float, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self._heard = False
        self._silent_since = self._running_at = now
        self._misses = self._looks = self._idle_looks = 0

    def answered(self, now: float) -> None:
        """A probe was answered."""
        self._heard = True
        self._restart(now)
        self._running_at = now

    def missed(self) -> None:
        """A probe was not answered in time, or could not be delivered."""
        self._misses += 1

    def look(self, now: float, activity: Activity) -> str | None:
        """Why the process counts as frozen, for people; None: it does not."""
        if activity is Activity.TRACED:  # by somebody who wants to see it just as it is
            self._restart(now)
        if activity is not Activity.STOPPED:
            self._running_at = now
        elif now - self._running_at >= self._patience.stopped_s:
            return f"stopped by a signal for {now - self._running_at:.0f} s"
        self._looks += 1
        self._idle_looks += activity is Activity.IDLE
        silent_s = now - self._silent_since
        if self._misses < _MIN_MISSES or silent_s < self._limit_s():
            return None
        return f"no answer for {silent_s:.0f} s"

    def _limit_s(self) -> float:
        if not self._heard:
            return self._patience.starting_s
        idle = 2 * self._idle_looks > self._looks
        return self._patience.idle_s if idle else self._patience.busy_s

    def _restart(self, now: float) -> None:
        self._silent_since = now
        self._misses = self._looks = self._idle_looks = 0
