"""Finds a planner that admits nothing although what the first waits for is there: a fault of the scheduler.

The count is independent of the planner's: it looks at the sequences and at what the executor last said. Where
it can't be sure it finds nothing: pages are counted with twice what the planner keeps for running sequences,
and reasons that depend on the executor's word (its room, its slots for adapters, its grammars) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.sequence_pool import SequencePool
from scheduler_service.core.target_executor import TargetExecutor
from scheduler_service.core.waiting.reasons import WaitReason

LOOK_S = 1.0
"""Between two looks, each of which counts the running sequences."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A request waits for something that is there."""

    reason: WaitReason  # as recorded
    detail: str  # for people; has no ids


class Watchdog:
    """Looks after a plan, at most once in LOOK_S, when nothing was admitted for `after_s`."""

    def __init__(self, after_s: float, pool: SequencePool, target: TargetExecutor) -> None:
        """after_s: 0: it never looks."""
        self._after_s, self._pool, self._target = after_s, pool, target
        self._looked_at, self._found_at = 0.0, 0.0
        self._fault: Fault | None = None

    @property
    def fault(self) -> Fault | None:
        """What the last look found; None once something was admitted or nothing waits."""
        waits = self._pool.waits
        return None if waits.head is None or waits.admitted_at >= self._found_at else self._fault

    def planned(self, now: float) -> None:
        """A step could be planned, and was or was not: nothing has happened since."""
        waits = self._pool.waits
        head = waits.head
        if head is None or not self._after_s or now - waits.admitted_at < self._after_s:
            return
        if now - head.wait.began < self._after_s or now - self._looked_at < LOOK_S:
            return
        self._looked_at = self._found_at = now
        limits, target = self._target.limits, self._target
        if limits is not None:
            there = _there(head, waits.reason, target, limits, self._pool)
            self._fault = Fault(waits.reason, there) if there else None


def _there(
    head: LiveSequence, reason: WaitReason, target: TargetExecutor, limits: JointLimits, pool: SequencePool
) -> str:
    """What the sequence lacks, and yet is there, in words; empty: it is not there, or nobody can say."""
    running = [one for one in pool.running if one.cache_id]
    match reason:
        case WaitReason.SEATS if len(running) < limits.max_sequences and head not in pool.isolated:
            return f"{len(running)} of {limits.max_sequences} places are taken"
        case WaitReason.PAGES | WaitReason.PAGES_IN_FLIGHT | WaitReason.RUNNING_PAGES:
            free = target.free_pages + target.evictable_pages - sum(one.pages for one in target.in_flight)
            kept = sum(2 + limits.pages(len(one.tokens)) - limits.pages(one.kv) for one in running)
            needed = limits.pages(head.end_kv or len(head.tokens) + 1) + kept
            if needed <= free:
                return f"{needed} pages are needed, those of running sequences included, and {free} are free"
        case WaitReason.ALONE if not pool.isolated:
            return "no sequence runs alone"
        case WaitReason.NO_EXECUTOR if not target.retiring:
            return "an executor is connected"
        case (
            WaitReason.STEP_BUDGET
            | WaitReason.OTHER_PROMPT
            | WaitReason.OTHER_STEP_SHARE
            | WaitReason.ANSWER_BYTES
            | WaitReason.DEADLINES
            | WaitReason.DRAFT_EXECUTOR
        ) if not running and not target.in_flight:
            return "nothing runs, and no step is being computed"
    return ""
