"""The steps that were sent and are not answered yet, and which sequences may have rows before the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_service.core.errors import UnknownStep
from scheduler_service.core.schedule import Schedule, ScheduledFork, ScheduledOpening, ScheduledRow
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.step import PlannedStep, StepAnswer
from scheduler_service.core.step_log import StepFigures


@dataclass(slots=True)
class SentStep:
    """A plan and its items. The answer to an item is ignored if its sequence has another cache by then, or
    none.
    """

    plan: PlannedStep
    rows: list[ScheduledRow]  # those of the plan
    openings: list[ScheduledOpening]
    forks: list[ScheduledFork]
    pages: int  # that it may take, at most
    has_prompts: bool  # a row or an opening computes tokens of a prompt
    figures: StepFigures


class StepsInFlight:
    """The steps in the order of sending, in which they are answered as well."""

    def __init__(self) -> None:
        self._steps: deque[SentStep] = deque()
        self._number = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[SentStep]:
        return iter(self._steps)

    @property
    def pages(self) -> int:
        """Pages that the steps in flight may take, at most."""
        return sum(step.pages for step in self._steps)

    @property
    def bring_pages(self) -> bool:
        """Some step in flight releases caches, so its answer will count more free pages."""
        return any(step.plan.releases for step in self._steps)

    def send(
        self, schedule: Schedule, releases: tuple[int, ...], pages: int, figures: StepFigures
    ) -> PlannedStep:
        """Turn a schedule into a plan, and count its rows as in flight. figures: get the rows' counts."""
        rows, openings, forks = schedule.rows, schedule.openings, schedule.forks
        has_prompts = bool(openings)
        prompts, verifications, drafted, fed = len(openings), 0, 0, len(rows)
        for row in rows:
            if row.limit or row.tokens:
                has_prompts |= row.limit > 0
                prompts += 1
                fed += max(0, row.limit - 1)
                row.sequence.send_row()
            elif row.drafts:
                verifications += 1
                drafted += len(row.drafts)
                row.sequence.send_verification(row.drafts)
            else:
                row.sequence.send_decode()
        for opening in openings:
            fed += opening.limit
            opening.sequence.send_row()
        figures.prompt_rows, figures.verify_rows, figures.drafted = prompts, verifications, drafted
        figures.decode_rows = len(rows) + len(openings) - prompts - verifications
        figures.tokens = fed + drafted
        self._number += 1
        plan = PlannedStep(self._number, releases, tuple(forks), tuple(rows), tuple(openings))
        self._steps.append(SentStep(plan, rows, openings, forks, pages, has_prompts, figures))
        return plan

    def take(self, result: StepAnswer, page_size: int) -> SentStep:
        """Remove and return the step that this answers. Raises UnknownStep, and changes nothing then."""
        if not self._steps or self._steps[0].plan.number != result.number:
            raise UnknownStep(f"no step in flight is answered by {result.number}")
        step = self._steps[0]
        rows = len(step.rows) + len(step.openings)
        if len(result.rows) != rows or len(result.forks) != len(step.forks):
            raise UnknownStep(f"the answer to step {result.number} has another number of rows or forks")
        self._steps.popleft()
        if self._steps:
            self._set_aside_again(step, result, page_size)
        return step

    def _set_aside_again(self, step: SentStep, result: StepAnswer, page_size: int) -> None:
        """Set pages aside anew for rows after a verification that rejected drafts.

        They start at a lower length than was assumed, so the page that they begin may be another one.
        """
        lengths = {
            row.cache_id: answer.kv_length or row.sequence.kv
            for row, answer in zip(step.rows, result.rows, strict=False)
            if len(answer.tokens) <= len(row.drafts)
        }
        if not lengths:
            return
        for later in self._steps:
            for row in later.rows:
                if row.is_bound and row.cache_id in lengths:
                    begin = lengths[row.cache_id]
                    lengths[row.cache_id] = end = begin + row.fed
                    pages = -(-end // page_size) + -begin // page_size
                    later.pages += pages - row.pages
                    row.pages = pages

    def clear(self) -> None:
        """Forget all steps: they will never be answered."""
        self._steps.clear()

    def rows_of(self, cache_id: int) -> int:
        """Number of unanswered rows and openings of a cache."""
        sent = [row.cache_id for step in self._steps for row in step.rows]
        sent += [opening.cache_id for step in self._steps for opening in step.openings]
        return sent.count(cache_id)

    def drafts_of(self, cache_id: int) -> int:
        """Number of unanswered drafts of a cache."""
        return sum(len(row.drafts) for step in self._steps for row in step.rows if row.cache_id == cache_id)


def can_go_ahead(sequence: LiveSequence) -> bool:
    """Whether a sequence with unanswered rows may get another row, which continues from their tokens.

    It may if each unanswered row decodes or verifies, the sequence is shorter than its end length even if all
    their drafts are accepted, and no decision about drafts is due (`plain_until`) that needs their answers
    (`ahead_at`). If a sampled token ends the sequence, the further row is computed in vain.
    """
    if not sequence.is_predictable:
        return False
    length = len(sequence.tokens) + sequence.ahead
    if length >= sequence.end_length:
        return False
    state = sequence.draft_state
    return state is None or length < state.plain_until or length == state.ahead_at
