"""Whether a step can be begun while the one before it is in flight.

Its rows then start from tokens that only the device knows yet. After a verification they start at lengths
that only the device knows: such a row gives an upper bound of its length, is reserved up to there, and gives
back what is too much when the verification is committed. Where a grammar says what may follow a token, its
masks are brought later (`masking.bring_masks`). The answers must be those of one step after another: wherever
the outcome of the step in flight could change an op, a row, a prefix hit or an answer, the new step waits for
it. Refused rows are not considered here: whatever the reason, the pipeline reserves such a step again after
the one in flight, whose rows may give back pages or a sequence. The same goes for a step that takes several
forwards.

One difference remains. When pages are so short that published ones are evicted, rows that are undone or
reserved again may have evicted pages that would have stayed. A prompt then finds a shorter prefix cached, or,
with no page left at all, is refused where it might have been accepted. Tokens are never different.
"""

from __future__ import annotations

import numpy as np

from executor_service.cache.kv_cache import prefix_root
from executor_service.cache.session import ClientSession
from executor_service.contract.plan import (
    Fork,
    Op,
    Opening,
    OutputMode,
    PlannedRows,
    Refusal,
    Release,
    Row,
    StepPlan,
)
from executor_service.steps.accepted_row import AcceptedRow
from executor_service.steps.step_rows import StepRows


def must_wait(plan: StepPlan, session: ClientSession, ahead: StepRows, page_size: int) -> bool:
    """Whether the outcome of `ahead`, the rows in flight, must be known before the step can be begun.

    A step of ops alone waits: without a forward it would be answered before the step ahead of it.
    """
    if not (plan.rows or plan.openings):
        return True
    return (
        any(_op_waits(op, session, ahead, page_size) for op in plan.ops)
        or _some_row_waits(plan.rows, session, ahead)
        or _hits_wait(plan.openings, ahead, page_size)
    )


def _op_waits(op: Op | Refusal, session: ClientSession, ahead: StepRows, page_size: int) -> bool:
    """Truncations and forks wait for a row of their sequence; a release only where it could be observed.

    That is where the row opens the sequence, so that its id may become unused again, or publishes a page.
    """
    if isinstance(op, Refusal):
        return False
    if isinstance(op, Fork):
        return True
    ids = op.cache_ids if isinstance(op, Release) else (op.cache_id,)
    rows = (_row_in_flight(cache_id, session, ahead) for cache_id in ids)
    if isinstance(op, Release):
        return any(row is not None and (row.opened or _new_prefix(row, page_size)) for row in rows)
    return any(row is not None for row in rows)


def _some_row_waits(rows: PlannedRows, session: ClientSession, ahead: StepRows) -> bool:
    """Whether any row does. One that only decodes can always continue one that does the same."""
    caches, places, mispredicted = session.caches, ahead.places, ahead.mispredicted
    decodes = len(ahead.decodes)
    for index in range(len(rows)) if ahead.accepted or mispredicted else rows.others:
        sequence = caches.get(rows.cache_ids[index])
        if sequence is None or (place := places.get(sequence)) is None:
            continue
        if sequence in mispredicted:
            return True
        if place < decodes and index not in rows.others:
            continue
        row = rows[index]
        if not isinstance(row, Refusal) and _row_waits(row, ahead.row_at(place)):
            return True
    return False


def _row_waits(row: Row, former: AcceptedRow) -> bool:
    """A row can continue one in flight, `former`, that samples, or that feeds a part of a prompt.

    After drafts only their answer tells whether a length is right, and not whether it is within a bound.
    """
    if len(row.tokens) or row.steps > 1:
        return True
    if not former.outputs:
        return False
    return (
        former.output is not OutputMode.SAMPLE
        or (former.open_drafts > 0 and not row.is_bound)
        # A row's masks and a grammar's must both be known to be joined.
        or (former.sequence.sampling.grammar is not None and row.masks is not None)
    )


def _hits_wait(openings: tuple[Opening | Refusal, ...], ahead: StepRows, page_size: int) -> bool:
    """Whether a prompt begins with a page that becomes public when `ahead` is committed."""
    if not openings:
        return False
    prefixes = [
        (sequence, start + 1)
        for sequence, start in zip(ahead.decodes.sequences, ahead.decodes.starts, strict=True)
        if (start + 1) % page_size == 0
    ]
    prefixes += [(row.sequence, end) for row in ahead.accepted if (end := _new_prefix(row, page_size))]
    if not prefixes:
        return False
    asked = [(one, prefix_root(one.salt, one.adapter)) for one in openings if not isinstance(one, Refusal)]
    return any(
        end <= opening.max_hit
        and root == sequence.table.root
        and np.array_equal(opening.tokens[:end], sequence.ids[:end])
        for opening, root in asked
        for sequence, end in prefixes
    )


def _new_prefix(row: AcceptedRow, page_size: int) -> int:
    """Tokens in the shortest prefix that the row's commit may publish; 0: it publishes none."""
    end = (len(row.sequence.table.hashes) + 1) * page_size
    return end if end <= row.finite_length(row.end) else 0


def _row_in_flight(cache_id: int, session: ClientSession, ahead: StepRows) -> AcceptedRow | None:
    sequence = session.caches.get(cache_id)
    return None if sequence is None else ahead.row_of(sequence)
