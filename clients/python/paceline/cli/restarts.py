"""Decides when to restart a process that ended, and when to give up, from its runs so far. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass

LOOP_DEATHS = 5
"""Number of unexpected ends, without a good run between them, that count as a crash loop."""

MAX_FAILED_STARTS = 10
"""Number of runs in a row that never served after which the process is given up."""

MAX_WRONG_STARTS = 5
"""Number of runs in a row that ended for wrong settings after which a process that had served is given up."""

_USAGE = 2
_WRONG_SETTINGS = (_USAGE, os.EX_CONFIG)  # exit statuses of a service whose settings or model are wrong


@dataclass(frozen=True, slots=True)
class ProcessRun:
    """One run of a process, from its start to its end."""

    seconds: float  # duration
    served: bool  # whether it was ever SERVING
    status: int  # exit status; negative: the number of the signal that ended it


@dataclass(frozen=True, slots=True)
class Restart:
    """The decision after a process has ended."""

    wait_s: float  # before the restart
    deaths: int  # unexpected ends without a good run between them, this one included
    within_s: float  # time from the start of the first of these runs to now
    hopeless: str  # the reason to give up; empty: restart it

    @property
    def loop(self) -> bool:
        """Whether the process is in a crash loop."""
        return self.deaths >= LOOP_DEATHS


class Restarts:
    """Backoff between restarts, in seconds: from `first_s`, doubling up to `max_s`.

    It starts over after a good run: one that served and lasted at least `good_run_s`.

    A process whose settings are wrong is given up at once if it has never served. If it has, one of its files
    may be half written at the moment, so it is given up after MAX_WRONG_STARTS such ends in a row.
    """

    def __init__(self, first_s: float = 0.1, max_s: float = 10.0, good_run_s: float = 30.0) -> None:
        self._first_s, self._max_s, self._good_run_s = first_s, max_s, good_run_s
        self._next_s = first_s
        self._deaths = self._failed_starts = self._wrong_starts = 0
        self._within_s = 0.0
        self._has_served = False

    def after(self, run: ProcessRun) -> Restart:
        """Record a run that ended unexpectedly; returns the decision."""
        if run.served and run.seconds >= self._good_run_s:
            self._reset()
        self._deaths += 1
        self._failed_starts = 0 if run.served else self._failed_starts + 1
        wrong = not run.served and run.status in _WRONG_SETTINGS
        self._wrong_starts = self._wrong_starts + 1 if wrong else 0
        self._has_served |= run.served
        self._within_s += run.seconds
        restart = Restart(self._next_s, self._deaths, self._within_s, self._hopeless(run))
        self._within_s += self._next_s
        self._next_s = min(self._next_s * 2, self._max_s)
        return restart

    def _hopeless(self, run: ProcessRun) -> str:
        if self._wrong_starts >= (MAX_WRONG_STARTS if self._has_served else 1):
            return f"exit status {run.status} means that its settings or its model are wrong"
        if self._failed_starts >= MAX_FAILED_STARTS:
            return f"{self._failed_starts} starts in a row never served"
        return ""

    def _reset(self) -> None:
        self._next_s = self._first_s
        self._deaths = self._failed_starts = self._wrong_starts = 0
        self._within_s = 0.0
