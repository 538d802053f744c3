"""Steps that are too long for one forward: which these are, and how their tokens are cut into forwards."""

from __future__ import annotations

from collections.abc import Iterable

from executor_service.cache.session import ClientSession
from executor_service.contract.plan import Refusal, StepPlan
from executor_service.steps.accepted_row import AcceptedRow


def may_take_several(plan: StepPlan, session: ClientSession, max_piece_tokens: int) -> bool:
    """Whether the step may need more than one forward: False only if it certainly does not.

    Called before anything is reserved, so prompts count in full: the prefix hit is not known yet.
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


def cut(rows: Iterable[AcceptedRow], max_tokens: int) -> list[tuple[AcceptedRow, int]]:
    """The next forward: rows in their order, with the number of tokens that each feeds.

    These are at most `max_tokens` in all. A row's output positions are its last tokens and are not split; if
    they alone are more than `max_tokens`, they are a forward of their own.
    """
    pieces: list[tuple[AcceptedRow, int]] = []
    room = max_tokens
    for row in rows:
        count = min(row.fed, room)
        if count < row.fed:
            count = min(count, row.fed - row.outputs)
            if not count and not pieces:
                count = row.fed
        if count:
            pieces.append((row, count))
            room -= count
        if room <= 0:
            break
    return pieces
