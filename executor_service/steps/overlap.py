"""Whether a step can be begun while the one before it is under way.

Its rows then go by lengths that are foreseen, and by tokens that only the device knows. That must not show:
where what the step before finds out could change an op, a row, a prefix hit or a reply, the step waits for
it. Refused rows are not looked for here: whatever the reason, the engine prepares such a step again behind
the other one, whose rows may give back pages, or a sequence's place, that they had reserved. The same holds
for a step that takes several forwards: it has the device for itself, and nothing is begun behind it.

One thing does show: while pages are so short that published ones are evicted, rows that are undone or
prepared again may have cost some that would have stayed. A prompt then finds less of itself cached, and with
no page left at all is refused where it might have been taken; tokens are never others.
"""

from __future__ import annotations

import numpy as np

from executor_service.cache.session import Session
from executor_service.contract.plan import Fork, Op, Opening, OutputMode, Refusal, Release, Row, StepPlan
from executor_service.steps.batch import Batch
from executor_service.steps.job import Job


def must_wait(plan: StepPlan, session: Session, ahead: Batch) -> bool:
    """Whether the outcome of `ahead`, which is under way, must be known before the step can be begun.

    A step of ops alone waits: with nothing for the device to do it would be done before the one ahead of it.
    """
    if not (plan.rows or plan.openings):
        return True
    return (
        any(_op_waits(op, session, ahead) for op in plan.ops)
        or any(_row_waits(row, session, ahead) for row in plan.rows)
        or _hits_wait(plan.openings, ahead)
    )


def _op_waits(op: Op | Refusal, session: Session, ahead: Batch) -> bool:
    """A release waits only where it could leave the prefix cache or the used ids as something else."""
    if isinstance(op, Refusal):
        return False
    if isinstance(op, Fork):
        return True
    ids = op.cache_ids if isinstance(op, Release) else (op.cache_id,)
    jobs = (_under_way(cache_id, session, ahead) for cache_id in ids)
    if isinstance(op, Release):
        return any(job is not None and (job.opened or ahead.new_prefix(job)) for job in jobs)
    return any(job is not None for job in jobs)


def _row_waits(row: Row | Refusal, session: Session, ahead: Batch) -> bool:
    """A row can continue one under way that has one token to sample, or none."""
    if isinstance(row, Refusal):
        return False
    job = _under_way(row.cache_id, session, ahead)
    if job is None:
        return False
    if len(row.tokens) or len(row.drafts) or row.steps > 1 or row.is_bound or ahead.lost(job):
        return True
    if not job.outputs:
        return False
    return job.outputs > 1 or job.output is not OutputMode.SAMPLE or job.sequence.sampling.looks_back


def _hits_wait(openings: tuple[Opening | Refusal, ...], ahead: Batch) -> bool:
    """Whether a prompt begins with a page that becomes public when `ahead` is done."""
    if not openings:
        return False
    prefixes = [(job.sequence, end) for job in ahead.jobs if (end := ahead.new_prefix(job))]
    return any(
        end < len(opening.tokens)
        and opening.salt == sequence.salt
        and np.array_equal(opening.tokens[:end], sequence.ids[:end])
        for opening in openings
        if not isinstance(opening, Refusal)
        for sequence, end in prefixes
    )


def _under_way(cache_id: int, session: Session, ahead: Batch) -> Job | None:
    sequence = session.caches.get(cache_id)
    return None if sequence is None else ahead.job_of(sequence)
