"""Speculation as the planner and the reader of results see it: which sequence gets which drafts.

    decide ──► drafts that are there (n-grams, made earlier) ──► attach ──► verified by the target
          └──► waits for the draft executor: plan_draft ──► apply_draft ──► decided again

Each sequence is decided about once for every number of known tokens at which it could be in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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

FRUITLESS_DECISIONS = 4
"""Decisions per step, about, that give no drafts: the more sequences run, the longer each rests after one."""

PROMISING = 0.2
"""A sequence whose first draft is accepted with at least this probability does not rest for long: that it got
no drafts is the price of a step, which changes with the load and is only learned by trying."""

MAX_REST = 64
"""Tokens that a sequence decodes plainly at most before it is decided about again."""

SETTLED_STEPS, TIMED_STEPS = 64, 4
"""After SETTLED_STEPS target steps without a draft, one in TIMED_STEPS is counted and learned from."""

SPARSE_REST = 16
"""Tokens of a rest from which on they are indexed sparsely."""

PLAIN_RUN = 8
"""With several steps in flight: tokens that a sequence without drafts decodes before it is decided again."""


@dataclass(slots=True)
class _Choice:
    """One decision: its bounds, and the sequences that there is something to choose for."""

    max_drafts: int  # that the target verifies in one row
    automatic: int  # the same, where the controller decides
    too_late: float  # a sequence with an earlier deadline gets no drafts
    may_ask: bool  # the draft executor
    min_rest: int  # tokens: of a sequence that gets no drafts
    max_rest: int
    index_budget: int = INDEX_BUDGET
    at_once: list[tuple[LiveSequence, DraftState, Candidate]] = field(default_factory=list)
    to_ask: list[tuple[LiveSequence, DraftState, DraftCandidate]] = field(default_factory=list)
    decided: list[tuple[LiveSequence, DraftState]] = field(default_factory=list)  # had a candidate, or drafts
    offered: set[LiveSequence] = field(default_factory=set)  # have drafts for their next row


class Speculator:
    """Owns the drafters, the controller and what is known of the draft executor."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._controller = Controller(config.max_draft_tokens)
        self._ngram_populations = ngram_populations()
        self._executor_population = executor_population()
        self._draft_executor = DraftExecutor(config, self._controller.draft)
        self._offered: set[LiveSequence] = set()  # have drafts for their next row, as of the last decision
        self._awake: dict[LiveSequence, None] = {}  # to be decided about at the next occasion
        self._resting: dict[
            int, list[LiveSequence]
        ] = {}  # the others with a cache, by the step that ends the rest
        self._steps = 0  # of the target, answered
        self._drafted_step = 0  # the last of them that had drafts, or one shortly before it

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
        automatic = min(self._config.max_draft_tokens, max_drafts)
        choice = _Choice(
            max_drafts,
            automatic,
            too_late=now + DEADLINE_STEPS * step_s,
            may_ask=executor.responsive,
            min_rest=PLAIN_RUN if ahead and not executor.late else 0,
            max_rest=min(MAX_REST, len(running) // FRUITLESS_DECISIONS),
        )
        for sequence in list(self._awake):
            self._consider(sequence, choice)
        if choice.to_ask or choice.at_once:
            base = Work(len(running), len(running), sum([s.kv for s in running]))
            if choice.to_ask:
                self._ask(choice, base, now)
            if choice.at_once:
                self._propose(choice, base)
        self._offered = choice.offered
        for sequence, state in choice.decided:
            if state.drafts:
                self._offered.add(sequence)
            elif not sequence.awaits_drafts:
                self._rest(sequence, state, choice)

    def _rest(self, sequence: LiveSequence, state: DraftState, choice: _Choice) -> None:
        """Let a sequence that got no drafts decode plainly; one with a fixed length never rests."""
        if state.length is not None:
            return
        state.rest(sequence.input_length, choice.min_rest, choice.max_rest, sequence.cache_id)
        if state.rested > 1:
            del self._awake[sequence]
            self._resting.setdefault(self._steps + state.rested, []).append(sequence)

    def opened(self, sequence: LiveSequence) -> None:
        """A step opens its cache, or makes it as a copy."""
        if sequence.draft_state is not None:
            self._awake[sequence] = None

    def _consider(self, sequence: LiveSequence, choice: _Choice) -> None:
        """Put a sequence that is due among those to choose drafts for, unless it can have none now."""
        state = sequence.draft_state
        if state is None or not sequence.cache_id:
            del self._awake[sequence]  # until it is opened again
            return
        drafter = state.ngram
        if sequence.state is not SequenceState.RUNNING:
            if drafter is not None and choice.index_budget > 0:
                choice.index_budget -= drafter.update(choice.index_budget)  # while the prompt is computed
            return
        if sequence.in_flight or sequence.awaits_drafts:
            return
        known = len(sequence.tokens)
        if known < state.plain_until:
            return
        if state.decided_at == known:
            if state.drafts:
                choice.offered.add(sequence)  # there was no row for it since
            return
        sparsely = state.rested >= SPARSE_REST
        state.decided_at = known
        state.sent = None
        if drafter is not None:
            budget = max(choice.index_budget, MIN_INDEXED)
            choice.index_budget -= drafter.update(budget, sparsely=sparsely)
        if state.drafts:
            state.keep(sequence.tokens)
        most = choice.automatic if state.length is None else min(state.length, choice.max_drafts)
        if known + most >= sequence.end_length:
            most = sequence.end_length - known - 1
        deadline = sequence.live.request.deadline
        if most < 1 or (deadline is not None and deadline < choice.too_late):
            state.drafts = ()
            self._rest(sequence, state, choice)
            return
        if state.drafts and state.executor is not None:
            ready = state.executor.candidate(min(most, len(state.drafts)))
            assert ready is not None
            choice.at_once.append((sequence, state, ready))
            choice.decided.append((sequence, state))
            return
        executor = self._draft_executor
        ngram = None if drafter is None else drafter.candidate(most)
        asked = executor.candidate(sequence, state, most) if choice.may_ask else None
        if state.executor is not None or (ngram is not None and ngram.first >= PROMISING):
            state.promising_at = known
        if asked is not None:
            candidate = DraftCandidate(asked, ngram, executor.pending(sequence))
            choice.to_ask.append((sequence, state, candidate))
        elif ngram is not None:
            choice.at_once.append((sequence, state, ngram))
        else:
            self._rest(sequence, state, choice)
            return
        choice.decided.append((sequence, state))

    def _ask(self, choice: _Choice, base: Work, now: float) -> None:
        """Ask the draft executor for the sequences whom its drafts serve best; n-grams for the others."""
        automatic = [candidate for _, state, candidate in choice.to_ask if state.length is None]
        lengths: Iterator[int] = iter(())
        if automatic:
            chosen = self._controller.drafting(base, automatic)
            self._draft_executor.cohorts = chosen.cohorts
            lengths = iter(chosen.lengths)
        for sequence, state, candidate in choice.to_ask:
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
                choice.at_once.append((sequence, state, ngram))

    def _propose(self, choice: _Choice, base: Work) -> None:
        """Choose how many of the drafts that are there are to be verified."""
        automatic = [candidate for _, state, candidate in choice.at_once if state.length is None]
        lengths = iter(self._controller.lengths(base, automatic) if automatic else ())
        for sequence, state, candidate in choice.at_once:
            count = next(lengths) if state.length is None else candidate.most
            if state.drafts:
                state.drafts = state.drafts[:count]
            elif count and state.ngram is not None:
                state.offer(state.ngram.drafts(count), len(sequence.tokens), DraftSource.NGRAM)

    def holds(self, running: SequenceQueue, step_s: float) -> bool:
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
        offered = self._offered
        if not offered:
            return
        self._drafted_step = self._steps + 1
        tokens_left = schedule.tokens_left
        pages_left = max(0, schedule.pages_left - reserve)
        for row in schedule.rows:
            sequence = row.sequence
            if sequence not in offered:
                continue
            state = sequence.draft_state
            if state is None or state.offered_at != row.kv_length + 1:
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

    def stepped(self, plan: PlannedStep, seconds: float, *, always: bool) -> Work | None:
        """The target answered a step after so long. Returns what the step computed; None: it was not counted.

        Where nothing has been drafted for a while, one step in TIMED_STEPS is counted, or each with `always`.
        A resting sequence gets at most one token in a step, so its rest lasts at least as many steps.
        """
        self._steps += 1
        self._awake.update(dict.fromkeys(self._resting.pop(self._steps, ())))
        settled = self._steps > self._drafted_step + SETTLED_STEPS
        if settled and self._steps % TIMED_STEPS and not always:
            return None
        chunks = [row.limit for row in plan.rows if row.limit]
        drafts = [row.drafts for row in plan.rows if row.drafts]
        prompt = sum(chunks) + sum([opening.limit for opening in plan.openings])
        rows = len(plan.rows) - len(chunks)
        tokens = rows + sum(map(len, drafts))
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

    def plan_draft(self, running: SequenceQueue, now: float, *, alone: bool) -> PlannedStep | None:
        """The draft executor's next step, after `decide`; releases only while a sequence runs `alone`."""
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
