"""A step that was sent and is not answered yet."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.core.schedule import Schedule, ScheduledFork, ScheduledOpening, ScheduledRow
from scheduler_service.core.step import Plan


@dataclass(slots=True)
class SentStep:
    """A plan and its items. A sequence that has another cache by the time of the answer, or none, is not
    concerned any more.
    """

    plan: Plan
    rows: list[ScheduledRow]  # those of the plan
    openings: list[ScheduledOpening]
    forks: list[ScheduledFork]
    pages: int  # reserved by it at most
    sent_at: float

    @classmethod
    def of(
        cls, schedule: Schedule, number: int, releases: tuple[int, ...], pages: int, now: float
    ) -> SentStep:
        """Send what is scheduled: from now on its sequences await answers."""
        rows, openings, forks = schedule.rows, schedule.openings, schedule.forks
        for row in rows:
            if row.limit or row.tokens or row.drafts:
                row.sequence.send_row()
            else:
                row.sequence.send_decode()
        for opening in openings:
            opening.sequence.send_row()
        plan = Plan(number, releases, tuple(forks), tuple(rows), tuple(openings))
        return cls(plan, rows, openings, forks, pages, now)
