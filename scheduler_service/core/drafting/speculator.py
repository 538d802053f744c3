"""Speculation as the planner and the reader of results see it: which sequence gets which drafts.

    decide ──► drafts that are there (n-grams, made earlier) ──► attach ──► verified by the target
          └──► waits for the draft executor: plan_draft ──► apply_draft ──► decided again

Each sequence is decided about once for every number of known tokens at which it could be in a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.drafting.draft_executor import DraftExecutor
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.request import DraftSource
from scheduler_service.core.schedule import Schedule
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.speculation.controller import Candidate, Controller, DraftCandidate
from scheduler_service.core.speculation.draft_state import DraftState
from scheduler_service.core.speculation.drafters import (
    ExecutorDrafter,
    NgramDrafter,
    executor_population,
    ngram_populations,
)
from scheduler_service.core.speculation.step_time import StepTime, Work
from scheduler_service.core.states import SequenceState
from scheduler_service.core.step import Capacity, PlannedStep, StepAnswer

INDEX_BUDGET = 2048
"""Tokens that one decision adds to n-gram indexes, over all sequences: a long prompt takes several."""

MIN_INDEXED = 16
"""Tokens of one sequence that a decision indexes even if the budget is used up."""

DEADLINE_STEPS = 4
"""A sequence whose deadline is fewer steps away than this gets no drafts."""

PLAIN_RUN = 8
"""With several steps in flight: tokens that a sequence without drafts decodes before it is decided again."""


class Speculator:
    """Owns the drafters, the controller and what is known of the draft executor."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._controller = Controller(config.max_draft_tokens)
        self._ngram_populations = ngram_populations()
        self._executor_population = executor_population()
        self._draft_executor = DraftExecutor(config, self._controller.draft)

    def enlist(self, live: LiveRequest) -> None:
        """Give a new request's sequences the drafters that it asks for."""
        wish = live.request.speculation
        if not wish.drafters:
            return
        for sequence in live.sequences:
            ngram = executor = None
            if DraftSource.NGRAM in wish.drafters:
                ngram = NgramDrafter(sequence.tokens, self._ngram_populations)
            if DraftSource.EXECUTOR in wish.drafters:
                executor = ExecutorDrafter(self._executor_population)
            sequence.draft_state = DraftState(wish.length, ngram, executor)

    # -- decisions -------------------------------------------------------------------------------

    def decide(
        self,
        running: SequenceQueue,
        max_drafts: int,
        step_s: float,
        now: float,
        *,
        ahead: bool,
    ) -> None:
        """Decide about all sequences that could be in the next step and were not decided about yet.

        max_drafts: that the target verifies in one row. step_s: seconds of a recent target step.
        ahead: sequences may have rows sent before their last one is answered; those that get no drafts now
        will.
        """
        executor = self._draft_executor
        executor.expire(now)
        at_once: list[tuple[LiveSequence, DraftState, Candidate]] = []  # n-grams, or drafts made before
        to_ask: list[tuple[LiveSequence, DraftState, DraftCandidate]] = []
        index_budget = INDEX_BUDGET
        too_late = now + DEADLINE_STEPS * step_s
        automatic = min(self._config.max_draft_tokens, max_drafts)
        may_ask = executor.responsive
        decoding = SequenceState.RUNNING
        context = 0
        for sequence in running:
            context += sequence.kv
            state = sequence.draft_state
            if sequence.state is not decoding:
                if state is not None and state.ngram is not None and index_budget > 0:
                    index_budget -= state.ngram.update(index_budget)  # while the prompt is computed
                continue
            if state is None or sequence.in_flight or sequence.awaits_drafts:
                continue
            known = len(sequence.tokens)
            if state.decided_at == known:
                continue
            state.decided_at = known
            drafter = state.ngram
            if drafter is not None:
                index_budget -= drafter.update(max(index_budget, MIN_INDEXED))
            if state.drafts:
                state.keep(sequence.tokens)
            most = automatic if state.length is None else min(state.length, max_drafts)
            if known + most >= sequence.end_length:
                most = sequence.end_length - known - 1
            deadline = sequence.live.request.deadline
            if most < 1 or known < state.plain_until or (deadline is not None and deadline < too_late):
                state.drafts = ()
                continue
            if state.drafts and state.executor is not None:
                ready = state.executor.candidate(min(most, len(state.drafts)))
                assert ready is not None
                at_once.append((sequence, state, ready))
                continue
            ngram = None if drafter is None else drafter.candidate(most)
            asked = executor.candidate(sequence, state, most) if may_ask else None
            if asked is not None:
                to_ask.append((sequence, state, DraftCandidate(asked, ngram, executor.pending(sequence))))
            elif ngram is not None:
                at_once.append((sequence, state, ngram))
        base = Work(len(running), len(running), context)
        if to_ask:
            at_once += self._ask(to_ask, base, now)
        if at_once:
            self._propose(at_once, base)
        if ahead and not executor.late:
            self._run_plainly(running)

    def _run_plainly(self, running: SequenceQueue) -> None:
        """Let those that were decided about and got no drafts run ahead, without drafts, for a while."""
        for sequence in running:
            state = sequence.draft_state
            if state is None or sequence.in_flight or sequence.awaits_drafts or state.length is not None:
                continue
            if state.decided_at == len(sequence.tokens) >= state.plain_until and not state.drafts:
                state.plain_until = state.decided_at + PLAIN_RUN

    def _ask(
        self, to_ask: list[tuple[LiveSequence, DraftState, DraftCandidate]], base: Work, now: float
    ) -> list[tuple[LiveSequence, DraftState, Candidate]]:
        """Ask the draft executor for the sequences whom its drafts serve best; returns the rest's n-grams."""
        others: list[tuple[LiveSequence, DraftState, Candidate]] = []
        automatic = [candidate for _, state, candidate in to_ask if state.length is None]
        lengths: Iterator[int] = iter(())
        if automatic:
            choice = self._controller.drafting(base, automatic)
            self._draft_executor.cohorts = choice.cohorts
            lengths = iter(choice.lengths)
        for sequence, state, candidate in to_ask:
            executor, ngram = candidate.executor, candidate.ngram
            if state.length is None:
                wanted = next(lengths)
            elif ngram is None or promise(executor, executor.most) >= promise(ngram, ngram.most):
                wanted = executor.most
            else:
                wanted = 0
            if wanted:
                self._draft_executor.ask(sequence, state, wanted, promise(executor, wanted), now)
            elif ngram is not None:
                others.append((sequence, state, ngram))
        return others

    def _propose(self, at_once: list[tuple[LiveSequence, DraftState, Candidate]], base: Work) -> None:
        """Choose how many of the drafts that are there are to be verified."""
        automatic = [candidate for _, state, candidate in at_once if state.length is None]
        lengths = iter(self._controller.lengths(base, automatic) if automatic else ())
        for sequence, state, candidate in at_once:
            count = next(lengths) if state.length is None else candidate.most
            if state.drafts:
                state.drafts = state.drafts[:count]
            elif count and state.ngram is not None:
                state.offer(state.ngram.drafts(count), len(sequence.tokens), DraftSource.NGRAM)

    def holds(self, running: SequenceQueue, step_s: float, now: float) -> bool:
        """Whether the next target step is better sent after those that wait have their drafts.

        Of two target steps of t seconds each, the p sequences with nothing to wait for would be in both and
        those that wait (d expected tokens) in one. If the step is held back for a draft step of u seconds,
        one target step serves all. That is better if (p + d) / (t + u) >= (2 p + d) / (2 t).
        """
        executor = self._draft_executor
        if not executor.is_awaited or executor.cohorts > 1:
            return False
        plain = sum(1 for s in running if not s.awaits_drafts and not s.in_flight)
        expected = executor.promised()
        return step_s * expected >= executor.step_s * (2 * plain + expected)

    # -- the target's steps ----------------------------------------------------------------------

    def attach(self, schedule: Schedule, reserve: int, page_size: int) -> None:
        """Add drafts to the rows of a step as far as its tokens and its pages beyond `reserve` go.

        Pages are counted as if all drafts were accepted.
        """
        tokens_left = schedule.tokens_left
        pages_left = max(0, schedule.pages_left - reserve)
        decoding = SequenceState.RUNNING
        for row in schedule.rows:
            sequence = row.sequence
            state = sequence.draft_state
            if state is None:
                continue
            state.sent = None
            if not state.drafts or state.known != row.kv_length + 1 or sequence.state is not decoding:
                continue
            end = row.kv_length + 1
            room = -end % page_size + pages_left * page_size
            count = min(len(state.drafts), tokens_left, room)
            if count < 1:
                continue
            pages = -(-(end + count) // page_size) + -end // page_size
            schedule.add_drafts(row, state.drafts[:count], pages)
            state.sent = state.maker
            tokens_left -= count
            pages_left -= pages

    def refused(self, sequence: LiveSequence) -> None:
        """The target refused a row with drafts: its next one has none."""
        if sequence.draft_state is not None:
            sequence.draft_state.plain_until = len(sequence.tokens) + 1
            sequence.draft_state.drafts = ()

    @property
    def step_time(self) -> StepTime:
        """The target's."""
        return self._controller.target

    def timed(self, plan: PlannedStep, seconds: float) -> Work:
        """Learn that the target took so long for a step; returns what the step computed."""
        chunks = [row.limit for row in plan.rows if row.limit]
        prompt = sum(chunks) + sum([opening.limit for opening in plan.openings])
        rows = len(plan.rows) - len(chunks)
        tokens = rows + sum([len(row.drafts) for row in plan.rows])
        context = tokens + prompt + sum([row.kv_length for row in plan.rows])
        work = Work(rows, tokens, context, prompt=prompt)
        self._controller.target.observe(work, seconds)
        return work

    # -- the draft executor ----------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """A draft executor is connected."""
        return self._draft_executor.connected

    @property
    def draft_step_s(self) -> float:
        """Moving average of the draft executor's step, in seconds; 0 before the first."""
        return self._draft_executor.step_s

    def ready(self, capacity: Capacity) -> None:
        """A draft executor that holds nothing of ours connected. Raises IllegalEvent while another is."""
        self._draft_executor.ready(capacity)

    def lost(self) -> None:
        """The draft executor is gone: those that wait decode plainly."""
        self._draft_executor.lost()

    def plan_draft(self, running: SequenceQueue, alone: bool, now: float) -> PlannedStep | None:
        """The draft executor's next step, after `decide`; only releases while a suspect runs `alone`."""
        if alone:
            return self._draft_executor.plan_releases(now)
        return self._draft_executor.plan(running, now)

    def apply_draft(self, result: StepAnswer, now: float) -> None:
        """Take the answer of the draft step. Raises UnknownStep."""
        self._draft_executor.apply(result, now)

    def next_wakeup(self, now: float) -> float | None:
        """When `decide` is due by itself, on the caller's clock; None: only after an event."""
        return self._draft_executor.next_wakeup(now)

    def check_integrity(self, running: SequenceQueue) -> None:
        """Compare the bookkeeping with itself. Raises AssertionError."""
        self._draft_executor.check_integrity(running)


def promise(candidate: Candidate, count: int) -> float:
    """Tokens that a verification of `count` drafts is expected to emit, the target's own one included."""
    expected, chance = 1.0, candidate.first
    for _ in range(count):
        expected += chance
        chance *= candidate.later
    return expected
