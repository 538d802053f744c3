"""Pure functions: which running sequences are preempted, for pages or for an identity below its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items

from scheduler_service.core.account import Account
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.sequence import LiveSequence

LEAD = 1024
"""Virtual tokens: an identity that was served this many more than another gives places to it, even if it does
not run more sequences than the other. Large enough that two identities do not preempt each other in turn."""


def victims_for_pages(
    running: Items[LiveSequence], needy: LiveSequence, shortage: int, limits: JointLimits
) -> Iterator[LiveSequence]:
    """The sequences to preempt for `shortage` pages, from the end of `running`, which is in order of turns.

    needy: the first sequence that lacks pages. Only those after it are preempted; those before it make
    progress, and it can wait for them. The pages that a preemption frees are an estimate, since they may be
    shared: it only decides how many sequences are preempted at once.
    """
    for sequence in reversed(running):
        if shortage <= 0 or sequence is needy:
            return
        shortage -= _pages_back(sequence, limits)
        yield sequence


def victims_for_share(
    running: Items[LiveSequence],
    account: Account,
    pages: int,
    is_spared: Callable[[LiveSequence], bool],
    limits: JointLimits,
) -> list[LiveSequence]:
    """The sequences to preempt for one of `account`, to free `pages` or, if 0, one place.

    running: in order of turns; the last ones are preempted first, except those that `is_spared`.

    Takes from an identity that keeps, by weight, at least as many running sequences as `account` gets, and
    from one that was served much more (LEAD) and keeps at least one. No identity gives way that was served
    less than `account`. Empty if all that may be preempted would not free enough.
    """
    gained = (account.running + 1) / account.weight
    found: list[LiveSequence] = []
    left: dict[str, int] = {}
    for sequence in reversed(running):
        other = sequence.live.account
        if other.counter < account.counter or (found and pages <= 0):
            break
        kept = left.get(other.identity, other.running) - 1
        leads = other.counter - account.counter > LEAD and kept
        if (kept / other.weight < gained and not leads) or is_spared(sequence):
            continue
        left[other.identity] = kept
        pages -= _pages_back(sequence, limits)
        found.append(sequence)
    return found if pages <= 0 else []


def _pages_back(sequence: LiveSequence, limits: JointLimits) -> int:
    """Estimate of the pages that preempting the sequence frees, at least 1."""
    return max(1, limits.pages(sequence.kv) - sequence.shared_tokens // limits.page_size)
