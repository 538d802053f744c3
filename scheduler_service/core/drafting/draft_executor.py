"""The draft executor as the core sees it: its caches, its step in flight, the sequences that wait for drafts.

A sequence that waits for drafts gets no row on the target, for at most `PATIENCE_STEPS` draft steps. Then it
decodes without drafts; those that arrive later are used as far as they still follow its known tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.drafting.draft_caches import DraftCaches
from scheduler_service.core.errors import IllegalEvent
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.request import DraftSource
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.speculation.controller import Candidate
from scheduler_service.core.speculation.draft_state import DraftState
from scheduler_service.core.speculation.step_time import StepTime
from scheduler_service.core.step import Capacity, PlannedStep, StepAnswer

PATIENCE_STEPS = 4
MIN_PATIENCE_S, MAX_PATIENCE_S = 0.05, 1.0
"""How long a sequence waits for drafts: PATIENCE_STEPS times the mean draft step, within these bounds."""

MAX_DRAFT_LOSSES = 3
"""A sequence gets no more drafts of a draft executor after this many of them were lost while they computed
it, with no answer in between."""

_SMOOTHING = 0.1  # weight of the newest step in the mean
_OUTLIER = 4.0  # a step counts as at most this multiple of the mean


class DraftExecutor:
    """Owns the caches on the draft executor and the sequences that wait for its drafts."""

    def __init__(self, config: CoreConfig, step_time: StepTime) -> None:
        """step_time: fitted to the durations of its steps."""
        self._caches = DraftCaches(config)
        self._step_time = step_time
        self._waiting: dict[LiveSequence, None] = {}  # for drafts; longest wait first
        self._late = False  # a sequence stopped waiting without drafts, and no answer has come since
        self._turned_away = False  # the last step had no room for a sequence: decide about it again
        self.cohorts = 1  # 2: one half of the sequences drafts while the other half is verified
        self.step_s = 0.0  # moving average of a step's duration; 0 before the first

    @property
    def connected(self) -> bool:
        """A draft executor is connected."""
        return self._caches.connected

    @property
    def responsive(self) -> bool:
        """It is connected and not late."""
        return self._caches.connected and not self._late

    @property
    def late(self) -> bool:
        """Since its last answer, a sequence has stopped waiting without drafts."""
        return self._late

    def ready(self, capacity: Capacity) -> None:
        """A draft executor without our caches connected. Raises IllegalEvent while another is connected."""
        if self._caches.connected:
            raise IllegalEvent("a draft executor is connected: it must be lost before another is ready")
        self._caches.ready(capacity)
        self._late = False

    def lost(self) -> None:
        """The draft executor is gone with its caches; waiting sequences decode without drafts."""
        for sequence in self._caches.in_flight():
            if sequence.draft_state is not None:
                sequence.draft_state.losses += 1
        self._caches.lost()
        self._stop_waiting(list(self._waiting))

    def forget(self, sequence: LiveSequence) -> None:
        """A sequence has ended: its draft cache is released by the next step, and nothing else is kept."""
        self._waiting.pop(sequence, None)
        self._caches.forget(sequence)

    # -- asking for drafts -----------------------------------------------------------------------

    def candidate(self, sequence: LiveSequence, state: DraftState, most: int) -> Candidate | None:
        """The sequence as a candidate for up to `most` drafts; None if the draft executor can make none."""
        if state.executor is None or state.losses >= MAX_DRAFT_LOSSES:
            return None
        return state.executor.candidate(min(most, self._caches.most_drafts(sequence)))

    def pending(self, sequence: LiveSequence) -> int:
        """Known tokens that the next row of its draft cache has to feed. The cache must exist."""
        return self._caches.pending(sequence)

    def ask(self, sequence: LiveSequence, state: DraftState, drafts: int, promise: float, now: float) -> None:
        """Let a sequence wait for `drafts` drafts; verifying them is expected to emit `promise` tokens."""
        state.wanted, state.since, state.promise = drafts, now, promise
        sequence.wait_for_drafts()
        self._waiting[sequence] = None

    @property
    def is_awaited(self) -> bool:
        """Some sequence waits for drafts."""
        return bool(self._waiting) and any(sequence.awaits_drafts for sequence in self._waiting)

    def promised(self) -> float:
        """Tokens that the verifications of all awaited drafts are expected to emit."""
        return sum(s.draft_state.promise for s in self._waiting if s.draft_state is not None)

    def expire(self, now: float) -> None:
        """End the wait of the sequences that have waited as long as they may."""
        self._turned_away = False
        while (ends := self._patience_ends()) is not None and ends <= now:
            self._late = True
            self._stop_waiting([next(iter(self._waiting))])

    def next_wakeup(self, now: float) -> float | None:
        """When the next decision is due without an event, on the caller's clock; None: not before one."""
        return now if self._turned_away else self._patience_ends()

    # -- its steps -------------------------------------------------------------------------------

    def plan(self, running: SequenceQueue, now: float) -> PlannedStep | None:
        """The next step, after a decision; None while one is in flight or if none is needed."""
        if not self._caches.connected or self._caches.step is not None:
            return None
        self._forget_gone()
        wanting = [(s, s.draft_state.wanted) for s in self._waiting if s.draft_state is not None]
        if self.cohorts > 1 and not any(_is_verifying(s) for s in running):
            wanting = wanting[: -(-len(wanting) // 2)]
        following = (s for s in running if not s.awaits_drafts and _may_draft(s))
        self._late = False
        plan = self._caches.plan(wanting, following, now)
        turned_away = [s for s, _ in wanting if not self._caches.has(s)]
        self._stop_waiting(turned_away)
        self._turned_away |= bool(turned_away)
        return plan

    def plan_releases(self, now: float) -> PlannedStep | None:
        """A step that only releases caches; None while one is in flight or if there is nothing to release."""
        if not self._caches.connected or self._caches.step is not None:
            return None
        return self._caches.plan((), (), now)

    def apply(self, result: StepAnswer, now: float) -> None:
        """Take the answer of the step in flight. Raises UnknownStep."""
        step = self._caches.step
        drafted = self._caches.apply(result)
        assert step is not None
        if step.work.rows:
            self._took(now - step.sent_at)
            self._step_time.observe(step.work, now - step.sent_at)
        self._late = False
        for made in drafted:
            sequence, state = made.sequence, made.sequence.draft_state
            assert state is not None
            state.losses = 0
            if made.drafts:
                state.offer(tuple(made.drafts), made.known, DraftSource.EXECUTOR)
            if sequence.awaits_drafts and (not made.drafts or made.known == len(sequence.tokens)):
                self._stop_waiting([sequence])

    def _took(self, seconds: float) -> None:
        if self.step_s:
            self.step_s += _SMOOTHING * (min(seconds, _OUTLIER * self.step_s) - self.step_s)
        else:
            self.step_s = seconds

    # -- waiting sequences -----------------------------------------------------------------------

    def _patience_ends(self) -> float | None:
        """When the sequence that has waited longest stops waiting; None: no sequence waits."""
        if not self._waiting:
            return None
        self._forget_gone()
        first = next(iter(self._waiting), None)
        state = None if first is None else first.draft_state
        if state is None:
            return None
        return state.since + max(MIN_PATIENCE_S, min(MAX_PATIENCE_S, PATIENCE_STEPS * self.step_s))

    def _stop_waiting(self, sequences: Iterable[LiveSequence]) -> None:
        """End the wait of these sequences: the next decision is about them again."""
        for sequence in sequences:
            self._waiting.pop(sequence, None)
            if sequence.awaits_drafts and sequence.draft_state is not None:
                sequence.stop_waiting_for_drafts()
                sequence.draft_state.decide_again()

    def _forget_gone(self) -> None:
        """Drop the sequences whose wait ended with the loss of their target cache."""
        for sequence in [s for s in self._waiting if not s.awaits_drafts]:
            del self._waiting[sequence]

    def check_integrity(self, running: SequenceQueue) -> None:
        """Compare the bookkeeping with itself and with the sequences. Raises AssertionError."""
        self._caches.check_integrity()
        self._forget_gone()
        waiting = {s for s in running if s.awaits_drafts}
        assert waiting == set(self._waiting), (
            "the sequences that wait for drafts are not those that are waited for"
        )
        assert not any(s.in_flight for s in waiting), "a sequence waits for drafts and for an answer"


def _may_draft(sequence: LiveSequence) -> bool:
    """The draft executor should have a cache of this sequence."""
    state = sequence.draft_state
    return state is not None and state.executor is not None and state.losses < MAX_DRAFT_LOSSES


def _is_verifying(sequence: LiveSequence) -> bool:
    """It has drafts of the draft executor that are still to be verified."""
    state = sequence.draft_state
    if state is None:
        return False
    if sequence.in_flight:
        return state.sent is DraftSource.EXECUTOR
    return bool(state.drafts) and state.maker is DraftSource.EXECUTOR
