"""Long steps in pieces: which need several forwards, and what each of them feeds."""

from __future__ import annotations

from collections.abc import Iterable

from executor_service.cache.session import Session
from executor_service.contract.plan import Refusal, StepPlan
from executor_service.steps.job import Job


def may_take_several(plan: StepPlan, session: Session, max_piece_tokens: int) -> bool:
    """Whether the step could need more than one forward: sure to be True where it does.

    Known before anything was changed: what the prefix cache holds of a prompt is not counted.
    """
    tokens = 0
    for row in plan.rows:
        if isinstance(row, Refusal):
            continue
        if row.steps > 1:
            return True
        sequence = session.caches.get(row.cache_id)
        known = 0 if sequence is None else sequence.known - sequence.length
        pending = len(row.tokens) or max(known, 1)
        tokens += min(pending, row.limit or pending) + len(row.drafts)
    for opening in plan.openings:
        if not isinstance(opening, Refusal):
            tokens += min(len(opening.tokens), opening.limit or len(opening.tokens))
    return tokens > max_piece_tokens


def cut(jobs: Iterable[Job], max_tokens: int) -> list[tuple[Job, int]]:
    """The next forward: rows in their order with the tokens that each feeds, `max_tokens` in all.

    The positions that a row brings back stay together, behind all else that it feeds: where they alone are
    more than `max_tokens`, they are a forward of their own.
    """
    pieces: list[tuple[Job, int]] = []
    room = max_tokens
    for job in jobs:
        count = min(job.fed, room)
        if count < job.fed:
            count = min(count, job.fed - job.outputs)
            if not count and not pieces:
                count = job.fed
        if count:
            pieces.append((job, count))
            room -= count
        if room <= 0:
            break
    return pieces
