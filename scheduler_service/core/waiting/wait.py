"""What a sequence keeps about its waiting, and an account about that of its sequences."""

from __future__ import annotations

import enum
from collections.abc import Collection

from scheduler_service.core.waiting.course import Course
from scheduler_service.core.waiting.reasons import WaitSums

MIN_PRIORITIES = 64
"""Priorities of firsts of an account whose times are kept apart at least."""


class Standing(enum.Enum):
    """Where a sequence without a cache waits. The head (`WaitLedger.head`) stands as if it were not that."""

    HELD = "held"  # until the prefix that it shares is computed
    BEHIND = "behind"  # others of its account are before it
    FIRST = "first"  # it is the first of its account


class Wait:
    """The waits of one sequence."""

    __slots__ = ("again", "began", "course", "has_run", "queued", "reading", "since", "standing")

    def __init__(self) -> None:
        self.standing: Standing | None = None  # None: it has a cache, or has ended
        self.since = 0.0  # up to this time its waiting is in the sums; if it has a cache, since when
        self.began = 0.0  # when it came into the queue, or into it again
        self.reading = 0.0  # of the running sum that its present standing takes the difference of
        self.has_run = False  # it has had a cache
        self.queued = WaitSums()  # from its arrival to its first cache
        self.again: WaitSums | None = None  # since then; None: it has not waited again
        self.course = Course()

    @property
    def sums(self) -> WaitSums:
        """Where time that it waits now belongs."""
        if not self.has_run:
            return self.queued
        if self.again is None:
            self.again = WaitSums()
        return self.again


class AccountWaits:
    """Of one account: seconds waited by reason, and for how long its first had which priority.

    From the latter follows how long a sequence that is not the first waited for a higher priority.
    """

    __slots__ = ("_by_priority", "_first", "_most", "_since", "sums")

    def __init__(self) -> None:
        self.sums = WaitSums()
        self._first: int | None = None  # priority of the first; None: nothing is queued
        self._since = 0.0  # since when
        self._by_priority: dict[int, float] = {}  # seconds, without the present first
        self._most = MIN_PRIORITIES

    def first(self, priority: int, now: float) -> None:
        """Another sequence is the first."""
        if priority == self._first:
            return
        self._roll(now)
        self._first = priority

    def empty(self) -> None:
        """Nothing is queued any more, so nobody holds a reading."""
        self._first = None
        self._by_priority.clear()
        self._most = MIN_PRIORITIES

    def above(self, priority: int, now: float) -> float:
        """A running sum: seconds during which the first had a higher priority than this one."""
        seconds = sum(s for p, s in self._by_priority.items() if p > priority)
        if self._first is not None and self._first > priority:
            seconds += now - self._since
        return seconds

    def is_above(self, priority: int) -> bool:
        """The first has a higher priority than this one."""
        return self._first is not None and self._first > priority

    @property
    def has_many(self) -> bool:
        """More priorities are kept apart than are worth it: `merge` should be called."""
        return len(self._by_priority) > self._most

    def merge(self, priorities: Collection[int]) -> None:
        """Keep apart only what readings of these priorities need: those of all queued sequences."""
        kept: dict[int, float] = {}
        present = sorted(priorities)
        for priority, seconds in sorted(self._by_priority.items()):
            below = [p for p in present if p < priority]
            if below:
                kept[below[-1] + 1] = kept.get(below[-1] + 1, 0.0) + seconds
        self._by_priority = kept
        self._most = 2 * len(kept) + MIN_PRIORITIES

    def _roll(self, now: float) -> None:
        if self._first is not None:
            self._by_priority[self._first] = self._by_priority.get(self._first, 0.0) + now - self._since
        self._since = now
