"""Speculation as the rest of the core sees it: which sequence gets which drafts for its next row.

    decide ──► drafts that are there (n-grams, forced, made earlier) ──► attach ──► verified by the target
          └──► waits for the draft executor: plan_draft ──► apply_draft ──► decided again

There is one decision about a sequence for each number of known tokens at which it could be in a step.
"""

from __future__ import annotations

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.drafting.decision import DraftDecision
from scheduler_service.core.drafting.draft_executor import DraftExecutor
from scheduler_service.core.drafting.rest_calendar import RestCalendar
from scheduler_service.core.in_flight import SentStep
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.request import DraftSource
from scheduler_service.core.schedule import Schedule
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.speculation.controller import Controller
from scheduler_service.core.speculation.draft_state import DraftState
from scheduler_service.core.speculation.drafters import (
    ExecutorDrafter,
    GrammarDrafter,
    NgramDrafter,
    executor_population,
    grammar_population,
    ngram_populations,
)
from scheduler_service.core.speculation.step_time import StepTime, Work, attended
from scheduler_service.core.step import Capacity, PlannedStep, RowAnswer, StepAnswer

MIN_OUTPUT = 3
"""Output tokens of a sequence that can have drafts: its prompt brings the first, a verification up to two."""

DEADLINE_STEPS = 4
"""A sequence whose deadline is fewer steps away than this gets no drafts."""

FRUITLESS_DECISIONS = 4
"""Decisions per step, about, that give no drafts: the more sequences run, the longer each rests after one."""

MAX_REST = 128
"""Maximum tokens that a sequence decodes plainly before it is decided about again. Fewer than
MAX_REST * FRUITLESS_DECISIONS running sequences rest less, as FRUITLESS_DECISIONS says."""

SETTLED_STEPS, TIMED_STEPS = 64, 16
"""After SETTLED_STEPS target steps without a draft, one in TIMED_STEPS is counted and learned from, and each
that computes tokens of prompts is learned from."""

PLAIN_RUN = 8
"""With several steps in flight: tokens that a sequence decodes without drafts before the draft executor is
asked again, which takes the answers to all its rows."""


class Speculator:
    """Owns the controller, the calendar of resting sequences and the draft executor."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._controller = Controller(config.max_draft_tokens)
        self._ngram_populations = ngram_populations()
        self._executor_population = executor_population()
        self._grammar_population = grammar_population()
        self._draft_executor = DraftExecutor(config, self._controller.draft)
        self._offered: set[LiveSequence] = set()  # have drafts for their next row, as of the last decision
        self._calendar = RestCalendar()
        self._drafted_step = 0  # the last of them that had drafts, or one shortly before it

    def enlist(self, live: LiveRequest) -> None:
        """Give a new request's sequences the speculation that it asks for, if they can have drafts at all."""
        length, drafters = live.request.speculation.length, live.request.drafters
        if not drafters:
            return
        for sequence in live.sequences:
            if sequence.end_length - sequence.input_length < MIN_OUTPUT:
                continue
            executor = grammar = None
            if DraftSource.EXECUTOR in drafters:
                executor = ExecutorDrafter(self._executor_population)
            if DraftSource.GRAMMAR in drafters:
                grammar = GrammarDrafter(self._grammar_population)
            sequence.draft_state = DraftState(length, executor, grammar, sequence.input_length)

    # -- decisions -------------------------------------------------------------------------------

    def decide(
        self,
        running: SequenceQueue,
        max_drafts: int,
        step_s: float,
        now: float,
        *,
        ahead: bool,
        drafts_ahead: bool,
        sends: bool,
    ) -> None:
        """Decide about the awake sequences that could be in the next step and have new tokens.

        max_drafts: that the target verifies in one row. step_s: seconds of a recent target step.
        ahead: a sequence may get further rows before its last one is answered. drafts_ahead: with drafts.
        sends: the target takes a step now.
        """
        executor = self._draft_executor
        executor.expire(now)
        decision = DraftDecision(
            self._controller,
            executor,
            self._calendar,
            max_drafts=max_drafts,
            max_automatic=min(self._config.max_draft_tokens, max_drafts),
            too_late=now + DEADLINE_STEPS * step_s,
            min_rest=PLAIN_RUN if drafts_ahead and not executor.late else 0,
            max_rest=min(MAX_REST, len(running) // FRUITLESS_DECISIONS),
            ahead=ahead and sends,
            drafts_ahead=drafts_ahead,
        )
        decision.consider(self._calendar.awake)
        if decision.open:
            decision.choose(Work(len(running), len(running), sum([s.kv for s in running])), now)
        self._offered = decision.offered

    def opened(self, sequence: LiveSequence) -> None:
        """A step opens the sequence's cache, or makes it as a copy."""
        state = sequence.draft_state
        if state is None:
            return
        self._calendar.wake(sequence, state)
        if state.ngram is None and DraftSource.NGRAM in sequence.live.request.speculation.drafters:
            assert isinstance(sequence.tokens, list)  # from now on: the index holds on to it
            state.ngram = NgramDrafter(sequence.tokens, self._ngram_populations)

    def ended(self, sequence: LiveSequence) -> None:
        """A sequence has ended, well or badly: keep nothing of it but what its usage tells."""
        if sequence.draft_state is not None:
            sequence.draft_state.retire()
            self._calendar.forget(sequence)
            self._offered.discard(sequence)
            self._draft_executor.forget(sequence)

    def force(self, sequence: LiveSequence, tokens: tuple[int, ...]) -> None:
        """The sequence's grammar leaves no choice for its next tokens: that ends its rest."""
        state = sequence.draft_state
        if state is not None and state.grammar is not None:
            state.grammar.tell(len(sequence.tokens), tokens)
            state.plain_until = 0
            self._calendar.wake(sequence, state)

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
        self._drafted_step = self._calendar.step + 1
        kept = min(reserve, schedule.pages_left)
        for row in schedule.rows:
            sequence, end = row.sequence, row.kv_length + 1
            state = sequence.draft_state
            if state is None or sequence not in offered or state.offered_at != end:
                continue
            drafts = state.drafts
            room = -end % page_size + (schedule.pages_left - kept) * page_size
            drafts = drafts[: max(0, min(schedule.tokens_left, room))]
            if drafts:
                pages = -(-(end + len(drafts)) // page_size) + -end // page_size
                schedule.add_drafts(row, drafts, state.maker, pages)
                state.sent = state.maker

    def refused(self, sequence: LiveSequence) -> None:
        """The target refused a row with drafts: the sequence's next row has none."""
        if sequence.draft_state is not None:
            sequence.draft_state.plain_until = len(sequence.tokens) + 1
            sequence.draft_state.drafts = ()

    @property
    def step_time(self) -> StepTime:
        """The fitted step time of the target."""
        return self._controller.target

    def stepped(self, step: SentStep, result: StepAnswer, seconds: float, *, always: bool) -> Work | None:
        """The target answered a step after `seconds`: fit the step time to it.

        Returns what the step computed, or None if it is not to be counted. If nothing has been drafted for a
        while, only one step in TIMED_STEPS is counted, or each with `always`.
        """
        self._calendar.step_answered()
        number = self._calendar.step
        counts = always or number <= self._drafted_step + SETTLED_STEPS or not number % TIMED_STEPS
        if not (counts or step.has_prompts):
            return None
        work = _work(step, result)
        self._controller.target.observe(work, seconds)
        return work if counts else None

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
        """A draft executor without our caches connected. Raises IllegalEvent while another is connected."""
        self._draft_executor.ready(capacity)

    def lost(self) -> None:
        """The draft executor is gone: the sequences that wait for it decode without drafts."""
        self._draft_executor.lost()

    def plan_draft(self, running: SequenceQueue, now: float, *, alone: bool) -> PlannedStep | None:
        """The draft executor's next step, after `decide`; with `alone` it only releases caches."""
        if alone:
            return self._draft_executor.plan_releases(now)
        return self._draft_executor.plan(running, now)

    def apply_draft(self, result: StepAnswer, now: float) -> None:
        """Take the answer of the draft step. Raises UnknownStep."""
        self._draft_executor.apply(result, now)

    def next_wakeup(self, now: float) -> float | None:
        """When `decide` is due without an event, on the caller's clock; None: not before one."""
        return self._draft_executor.next_wakeup(now)

    def check_integrity(self, running: SequenceQueue) -> None:
        """Compare the bookkeeping with itself. Raises AssertionError."""
        self._calendar.check_integrity(set(running))
        self._draft_executor.check_integrity(running)


def _work(step: SentStep, result: StepAnswer) -> Work:
    """What an answered step has computed."""
    rows = step.rows
    work = Work(len(rows), len(rows), len(rows) + sum([row.kv_length for row in rows]))
    if step.has_prompts:
        for row, answer in zip(rows, result.rows, strict=False):
            if row.limit:
                work.rows -= 1
                work.tokens -= 1
                work.context -= row.kv_length + 1
                _add_prompt(work, row.kv_length, answer)
        for answer in result.rows[len(rows) :]:
            _add_prompt(work, answer.cached_length, answer)
    drafts = sum([len(row.drafts) for row in rows if row.drafts])
    work.tokens += drafts
    work.context += drafts
    return work


def _add_prompt(work: Work, kv: int, answer: RowAnswer) -> None:
    """Count what a row has computed of a prompt after its first `kv` tokens; nothing if it was refused."""
    tokens = max(0, answer.kv_length - kv)
    work.prompt += tokens
    work.attended += attended(kv, tokens)
    work.context += kv + tokens
    if answer.scores is not None:
        work.scored += len(answer.scores.logprobs)
