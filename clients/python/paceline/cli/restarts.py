"""When a process that died is started again, and when no more: a pure judgement of its lives so far."""

from __future__ import annotations

import os
from dataclasses import dataclass

LOOP_DEATHS = 5
"""So many deaths without a good run between them are a crash loop."""

MAX_FAILED_STARTS = 10
"""So many lives in a row that never served: it will not."""

_USAGE = 2
_FINAL = (_USAGE, os.EX_CONFIG)  # a service's own words for: don't start me again with these settings


@dataclass(frozen=True, slots=True)
class Life:
    """One run of a process: its length in seconds, whether it ever served, and its exit status."""

    seconds: float
    served: bool
    status: int  # negative: the signal that ended it


@dataclass(frozen=True, slots=True)
class Restart:
    """What to do after a death."""

    wait_s: float
    deaths: int  # without a good run between them, this one included
    within_s: float  # from the first of these lives' start to now
    hopeless: str  # why starting it again is in vain; empty: it is not

    @property
    def loop(self) -> bool:
        """Whether it dies again and again."""
        return self.deaths >= LOOP_DEATHS


class Restarts:
    """Waits that double, and are forgotten after a good run."""

    def __init__(self, first_s: float = 0.1, max_s: float = 10.0, good_run_s: float = 30.0) -> None:
        self._first_s, self._max_s, self._good_run_s = first_s, max_s, good_run_s
        self._next_s = first_s
        self._deaths = self._failed_starts = 0
        self._within_s = 0.0

    def after(self, life: Life) -> Restart:
        """What to do after this life."""
        if life.served and life.seconds >= self._good_run_s:
            self._forget()
        self._deaths += 1
        self._failed_starts = 0 if life.served else self._failed_starts + 1
        self._within_s += life.seconds
        restart = Restart(self._next_s, self._deaths, self._within_s, self._hopeless(life))
        self._within_s += self._next_s
        self._next_s = min(self._next_s * 2, self._max_s)
        return restart

    def _hopeless(self, life: Life) -> str:
        if life.served:
            return ""
        if life.status in _FINAL:
            return f"exit status {life.status} means that its settings or its model are wrong"
        if self._failed_starts >= MAX_FAILED_STARTS:
            return f"{self._failed_starts} starts in a row never served"
        return ""

    def _forget(self) -> None:
        self._next_s = self._first_s
        self._deaths = self._failed_starts = 0
        self._within_s = 0.0
