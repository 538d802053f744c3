"""The steps that were sent and are not answered yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_service.core.errors import UnknownStep
from scheduler_service.core.schedule import Schedule, ScheduledFork, ScheduledOpening, ScheduledRow
from scheduler_service.core.step import PlannedStep, StepAnswer


@dataclass(slots=True)
class SentStep:
    """A plan and its items. A sequence that has another cache by the time of the answer, or none, is not
    concerned any more.
    """

    plan: PlannedStep
    rows: list[ScheduledRow]  # those of the plan
    openings: list[ScheduledOpening]
    forks: list[ScheduledFork]
    pages: int  # reserved by it at most
    sent_at: float


class StepsInFlight:
    """Oldest first: they are answered in order."""

    def __init__(self) -> None:
        self._steps: deque[SentStep] = deque()
        self._number = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[SentStep]:
        return iter(self._steps)

    @property
    def pages(self) -> int:
        """Pages that they may still take."""
        return sum(step.pages for step in self._steps)

    @property
    def bring_pages(self) -> bool:
        """Their answers will tell of pages that were released."""
        return any(step.plan.releases for step in self._steps)

    def send(self, schedule: Schedule, releases: tuple[int, ...], pages: int, now: float) -> PlannedStep:
        """Send what is scheduled: from now on its sequences await answers."""
        rows, openings, forks = schedule.rows, schedule.openings, schedule.forks
        for row in rows:
            if row.limit or row.tokens or row.drafts:
                row.sequence.send_row()
            else:
                row.sequence.send_decode()
        for opening in openings:
            opening.sequence.send_row()
        self._number += 1
        plan = PlannedStep(self._number, releases, tuple(forks), tuple(rows), tuple(openings))
        self._steps.append(SentStep(plan, rows, openings, forks, pages, now))
        return plan

    def take(self, result: StepAnswer) -> SentStep:
        """The step that this answers. Raises UnknownStep, and has changed nothing then."""
        if not self._steps or self._steps[0].plan.number != result.number:
            raise UnknownStep(f"no step in flight is answered by {result.number}")
        step = self._steps[0]
        rows = len(step.rows) + len(step.openings)
        if len(result.rows) != rows or len(result.forks) != len(step.forks):
            raise UnknownStep(f"the answer to step {result.number} has another number of rows or forks")
        return self._steps.popleft()

    def clear(self) -> None:
        """They will never be answered."""
        self._steps.clear()

    def rows_of(self, cache_id: int) -> int:
        """Rows and openings of a cache: how many answers it awaits."""
        sent = [row.cache_id for step in self._steps for row in step.rows]
        sent += [opening.cache_id for step in self._steps for opening in step.openings]
        return sent.count(cache_id)
