"""Decides whether a service process is frozen, from its answers and its activity. Pure: time is passed in."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_MIN_MISSES = 3  # unanswered probes in a row before a process can count as frozen


class Activity(enum.Enum):
    """The state of a process's threads, as the operating system reports it."""

    STOPPED = "stopped by a signal"
    TRACED = "held by a debugger"
    BUSY = "busy"  # at least one thread computes or waits for a disk
    IDLE = "idle"  # all threads wait
    UNKNOWN = "unknown"  # the system does not report it


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Seconds without an answer after which a process counts as frozen, by its activity.

    The process's event loop answers; loading, compiling and long steps do not block it. A stopped process is
    certainly frozen, an idle one almost certainly. A busy one may be computing while it holds the
    interpreter lock, or its machine may be overloaded. One that never answered may still be importing.
    """

    stopped_s: float = 4.0
    idle_s: float = 10.0
    busy_s: float = 30.0
    starting_s: float = 300.0


class FreezeDetector:
    """Watches one run of one process. `now` is the reading of a RunningClock, in seconds.

    That clock does not count the time in which this watching process was itself stopped.
    """

    def __init__(self, now: float, limits: SilenceLimits | None = None) -> None:
        self._limits = limits or SilenceLimits()
        self._has_answered = False
        self._silent_since = self._running_at = now  # _running_at: when it was last seen not stopped
        self._misses = self._samples = self._idle_samples = 0

    def answered(self, now: float) -> None:
        """Record that a probe was answered."""
        self._has_answered = True
        self._restart(now)
        self._running_at = now

    def missed(self) -> None:
        """Record that a probe was not answered in time, or could not be delivered."""
        self._misses += 1

    def freeze_reason(self, now: float, activity: Activity) -> str | None:
        """The reason why the process counts as frozen; None: it does not.

        `activity`: what the process does at this moment. Call this at regular intervals: each call is one
        sample.
        """
        if activity is Activity.TRACED:  # a process that a debugger holds must not be ended
            self._restart(now)
        if activity is not Activity.STOPPED:
            self._running_at = now
        elif now - self._running_at >= self._limits.stopped_s:
            return f"stopped by a signal for {now - self._running_at:.0f} s"
        self._samples += 1
        self._idle_samples += activity is Activity.IDLE
        silent_s = now - self._silent_since
        if self._misses < _MIN_MISSES or silent_s < self._limit_s():
            return None
        return f"no answer for {silent_s:.0f} s"

    def _limit_s(self) -> float:
        """The limit for the activity in most samples since the last answer."""
        if not self._has_answered:
            return self._limits.starting_s
        idle = 2 * self._idle_samples > self._samples
        return self._limits.idle_s if idle else self._limits.busy_s

    def _restart(self, now: float) -> None:
        self._silent_since = now
        self._misses = self._samples = self._idle_samples = 0
