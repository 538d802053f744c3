"""What a sequence did from its arrival to its end, stage by stage."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_service.core.waiting.reasons import WaitTimes

MAX_STAYS = 64
"""Stays that are kept apart: the last one goes on to the end, whatever happens in it."""


class Stage(enum.Enum):
    """What a sequence does."""

    QUEUE = "queue"  # waits for its first cache
    PREFILL = "prefill"  # its known tokens are being computed
    DECODE = "decode"
    PREEMPTED = "preempted"  # waits again, since others got its pages or the executor refused its cache
    FAILOVER = "failover"  # waits again, since its executor was lost


@dataclass(slots=True)
class Stay:
    """One stage, in seconds on the caller's clock. waits: its time by reason, if it waited."""

    stage: Stage
    began: float
    ended: float
    waits: WaitTimes = ()


class Course:
    """The stays of one sequence. Each begins where the one before ends."""

    __slots__ = ("_is_full", "_stays", "_waited")

    def __init__(self) -> None:
        self._stays: list[Stay] = []
        self._waited: WaitTimes = ()  # in earlier stays of the same sums
        self._is_full = False

    def __iter__(self) -> Iterator[Stay]:
        return iter(self._stays)

    @property
    def waits(self) -> bool:
        """It is in a stage without a cache."""
        return bool(self._stays) and self._stays[-1].stage not in (Stage.PREFILL, Stage.DECODE)

    def spent(self, stage: Stage) -> float:
        """Seconds in this stage, without those since the present one began."""
        return sum(stay.ended - stay.began for stay in self._stays if stay.stage is stage)

    def turn(self, stage: Stage, now: float) -> None:
        """The next stage begins."""
        self.end(now)
        self._is_full = len(self._stays) == MAX_STAYS
        if not self._is_full:
            self._stays.append(Stay(stage, now, now))

    def end(self, now: float) -> None:
        """The present stage has lasted until `now`."""
        if self._stays:
            self._stays[-1].ended = now

    def waited(self, sums: WaitTimes) -> None:
        """The present stage was a wait. sums: of all of its kind, first ones apart from later ones."""
        if self._is_full:
            return
        last, before = self._stays[-1], dict(self._waited)
        if before:
            last.waits = tuple((r, s - before.get(r, 0.0)) for r, s in sums if s > before.get(r, 0.0))
        else:
            last.waits = sums
        self._waited = () if last.stage is Stage.QUEUE else sums

    def lost(self) -> None:
        """The wait that has just begun is for another executor."""
        if not self._is_full and self._stays[-1].stage is Stage.PREEMPTED:
            self._stays[-1].stage = Stage.FAILOVER
