"""Why each sequence without a cache waits, and for how long: kept without looking at the queue.

A step has one reason, which the planner finds where it stops admitting. It is the *head*'s: that of the
sequence which was next. What the others wait for follows from where they stand:

    held             its leader computes the prefix that both have
    first            the first of its account, which is not the head: another identity's turn; or, while the
                     plans pass its adapter by, a slot for that
    behind           the first of its account: one with a higher priority, or an earlier one

Time is attributed when something changes: a sequence takes the difference of two readings of a running sum.
So a step costs a comparison, whatever waits.
"""

from __future__ import annotations

from collections.abc import Set

from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.waiting.course import Stage
from scheduler_service.core.waiting.reasons import ROUNDING_S, WaitReason, WaitSums
from scheduler_service.core.waiting.wait import Standing, Wait


class WaitLedger:
    """The reasons and times of all sequences that wait."""

    def __init__(self) -> None:
        self.now = 0.0  # the caller's clock, as of the last call that had the time
        self.head: LiveSequence | None = None  # None: nothing is queued, or all that is waits for slots
        self.reason = WaitReason.NONE  # why the last plan admitted no further sequence
        self.needed = self.available = 0  # by the head, of what it waits for; 0, 0: it can't be counted
        self.admitted_at = 0.0  # when a sequence last got a cache
        self.totals = WaitSums()  # of all sequences since the start, as far as they are attributed
        self._passed: dict[bytes, float] = {}  # adapters that the last plan passed by, and since when
        self._passed_s: dict[bytes, float] = {}  # seconds in which they were, before

    # -- where sequences stand -------------------------------------------------------------------

    def enter(self, live: LiveRequest) -> None:
        """A new request was taken: attribute what it waited for in the front end before."""
        waits = live.waits_before
        for sequence in live.sequences:
            sequence.wait.since = live.added_at
            sequence.wait.course.turn(Stage.QUEUE, live.request.arrival)
            for reason, seconds in waits:
                self._add(sequence, sequence.wait, reason, seconds)

    def hold(self, sequence: LiveSequence) -> None:
        """A new sequence is held."""
        self._stand(sequence, Standing.HELD)

    def queue(self, sequence: LiveSequence, first: LiveSequence, second: LiveSequence | None) -> None:
        """A sequence was queued; first, second: of its account, as they are now."""
        if sequence is not first:
            self._stand(sequence, Standing.BEHIND)
            return
        if second is not None:  # it was the first until now
            was_head = self.head is second
            self._stand(second, Standing.BEHIND)
            if was_head:
                self.head = sequence
        self._stand(sequence, Standing.FIRST)

    def hold_back(self, sequence: LiveSequence, queued: SequenceQueue, was_first: bool) -> None:  # noqa: FBT001
        """A sequence is held, and was queued. queued: the rest of its account's."""
        self._stand(sequence, Standing.HELD)
        self._left(sequence, queued, was_first)

    def leave(self, sequence: LiveSequence, queued: SequenceQueue, was_first: bool) -> None:  # noqa: FBT001
        """A sequence is queued no more: it has a cache, or has ended. queued: the rest of its account's."""
        wait = sequence.wait
        self._settle(sequence, wait)
        wait.course.waited(wait.sums.times())
        if sequence.cache_id:
            wait.course.turn(Stage.PREFILL, self.now)
        wait.standing, wait.has_run = None, True
        self._left(sequence, queued, was_first)

    def _left(self, sequence: LiveSequence, queued: SequenceQueue, was_first: bool) -> None:  # noqa: FBT001
        was_head = self.head is sequence
        if was_head:
            self.head = None
        if not queued:
            sequence.live.account.waits.empty()
        elif was_first:
            waits = sequence.live.account.waits
            if waits.has_many:
                waits.merge({one.live.request.priority for one in queued})
            self._stand(queued[0], Standing.FIRST)
            if was_head:
                self.head = queued[0]

    def release(self, sequence: LiveSequence) -> None:
        """A sequence is held no longer."""
        wait = sequence.wait
        self._settle(sequence, wait)
        wait.course.waited(wait.sums.times())
        wait.standing = None

    # -- the step's reason -----------------------------------------------------------------------

    def block(
        self, head: LiveSequence | None, reason: WaitReason, needed: int = 0, available: int = 0
    ) -> None:
        """A plan admitted no further sequence: why, and which was next."""
        self.needed, self.available = needed, available
        before = self.head
        if before is head and reason is self.reason:
            return
        if before is not None:
            self._settle(before, before.wait)
        if head is not None and head is not before:
            self._settle(head, head.wait)
        self.head, self.reason = head, reason
        if before is not None and before is not head:
            self._read(before, before.wait)

    def await_plan(self, first: LiveSequence | None) -> None:
        """No step can be planned now: what came since the last plan waits for the next one."""
        if self.head is None and first is not None:
            self.block(first, self.reason or WaitReason.STEP_BUDGET)

    def pass_by(self, adapters: Set[bytes]) -> None:
        """A plan starts no sequence of these adapters, since they wait for slots."""
        if not (adapters or self._passed):
            return
        for adapter in self._passed.keys() - adapters:
            self._passed_s[adapter] = self._passed_sum(adapter)
            del self._passed[adapter]
        for adapter in adapters - self._passed.keys():
            self._passed[adapter] = self.now

    # -- questions -------------------------------------------------------------------------------

    def reason_of(self, sequence: LiveSequence) -> WaitReason:
        """Why this sequence waits now; NONE if it does not."""
        if sequence is self.head:
            return self.reason
        match sequence.wait.standing:
            case None:
                return WaitReason.NONE
            case Standing.HELD:
                return WaitReason.PREFIX
            case Standing.FIRST:
                is_passed = sequence.live.request.adapter in self._passed
                return WaitReason.ADAPTER_SLOT if is_passed else WaitReason.OTHER_TURN
            case Standing.BEHIND:
                return self.behind(sequence)

    def behind(self, sequence: LiveSequence) -> WaitReason:
        """Why a sequence waits that is not the first of its account, unless it is the head."""
        has_higher = sequence.live.account.waits.is_above(sequence.live.request.priority)
        return WaitReason.OWN_PRIORITY if has_higher else WaitReason.OWN_EARLIER

    def settle(self, sequence: LiveSequence) -> None:
        """Bring a waiting sequence's sums up to now."""
        if sequence.wait.standing is not None:
            self._settle(sequence, sequence.wait)
            self._read(sequence, sequence.wait)

    # -- attribution -----------------------------------------------------------------------------

    def _stand(self, sequence: LiveSequence, standing: Standing) -> None:
        wait = sequence.wait
        if wait.standing is None:
            wait.since = wait.began = self.now
            if not wait.course.waits:
                wait.course.turn(Stage.PREEMPTED, self.now)
        else:
            self._settle(sequence, wait)
        wait.standing = standing
        if standing is Standing.FIRST:
            sequence.live.account.waits.first(sequence.live.request.priority, self.now)
        self._read(sequence, wait)

    def _read(self, sequence: LiveSequence, wait: Wait) -> None:
        """Take the reading that the next `_settle` is compared with."""
        if wait.standing is Standing.BEHIND:
            wait.reading = sequence.live.account.waits.above(sequence.live.request.priority, self.now)
        elif wait.standing is Standing.FIRST:
            wait.reading = self._passed_sum(sequence.live.request.adapter)

    def _settle(self, sequence: LiveSequence, wait: Wait) -> None:
        """Attribute the time since the last settling. If it goes on waiting, the caller takes a reading."""
        seconds = self.now - wait.since
        wait.since = self.now
        if seconds <= 0:
            return
        if sequence is self.head:
            self._add(sequence, wait, self.reason, seconds)
        elif wait.standing is Standing.HELD:
            self._add(sequence, wait, WaitReason.PREFIX, seconds)
        elif wait.standing is Standing.FIRST:
            passed = self._passed_sum(sequence.live.request.adapter) - wait.reading
            self._add(sequence, wait, WaitReason.ADAPTER_SLOT, passed)
            self._add(sequence, wait, WaitReason.OTHER_TURN, seconds - passed)
        elif wait.standing is Standing.BEHIND:
            above = sequence.live.account.waits.above(sequence.live.request.priority, self.now) - wait.reading
            self._add(sequence, wait, WaitReason.OWN_PRIORITY, above)
            self._add(sequence, wait, WaitReason.OWN_EARLIER, seconds - above)

    def _add(self, sequence: LiveSequence, wait: Wait, reason: WaitReason, seconds: float) -> None:
        if seconds > ROUNDING_S:
            wait.sums.add(reason, seconds)
            sequence.live.account.waits.sums.add(reason, seconds)
            self.totals.add(reason, seconds)

    def _passed_sum(self, adapter: bytes) -> float:
        since = self._passed.get(adapter)
        return self._passed_s.get(adapter, 0.0) + (0.0 if since is None else self.now - since)
