"""Speculation as planner and answers see it: who gets which drafts, and who waits for some.

    decide ──► drafts that are there (n-grams, made earlier) ──► attach ──► verified by the target
          └──► waits for the draft executor: plan_draft ──► apply_draft ──► decided again

A sequence is decided about once for every step that it could have. While it waits for drafts it
has no row, but for no longer than `patience_s`: then it decodes plainly, and what comes late counts
as far as it still fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.drafting.draft_caches import DraftCaches
from scheduler_service.core.errors import IllegalEvent
from scheduler_service.core.queue import SequenceQueue
from scheduler_service.core.request import Drafter
from scheduler_service.core.sequence import LiveRequest, Sequence
from scheduler_service.core.speculation.controller import Candidate, Controller, DraftCandidate
from scheduler_service.core.speculation.draft_state import DraftState
from scheduler_service.core.speculation.drafters import (
    ExecutorDrafter,
    NgramDrafter,
    executor_population,
    ngram_populations,
)
from scheduler_service.core.speculation.step_time import StepTime, Work
from scheduler_service.core.states import State
from scheduler_service.core.step import Capacity, Plan, Result, Row

MIN_PATIENCE_S, MAX_PATIENCE_S = 0.05, 1.0
PATIENCE_STEPS = 4
"""How long a sequence waits for drafts: so many draft steps, within those bounds."""

INDEX_BUDGET = 2048
"""Tokens that one decision adds to n-gram indexes, over all sequences: a long prompt takes several."""

MAX_DRAFT_LOSSES = 3
"""Draft executors that may die over a sequence, without an answer in between, until it gets none any more."""

HURRY_STEPS = 4
"""A sequence whose deadline is fewer steps away than this gets no drafts."""


PLAIN_RUN = 8
"""Tokens that a sequence decodes ahead of what is known before it is asked again whether it wants drafts."""


class Speculator:
    """Owns the drafters, the controller and the caches on the draft executor."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._controller = Controller(config.max_draft_tokens)
        self._ngram_populations = ngram_populations()
        self._executor_population = executor_population()
        self._caches = DraftCaches(config)
        self._waiting: dict[Sequence, None] = {}  # for the draft executor, longest first
        self._late = False  # it let somebody wait in vain and has not answered since
        self._undecided = False  # somebody stopped waiting since the last decision, with nothing to tell it
        self._cohorts = 1
        self.draft_step_s = 0.0  # moving average

    def enlist(self, live: LiveRequest) -> None:
        """Give a new request's sequences the drafters that it wants."""
        wish = live.request.speculation
        if not wish.drafters:
            return
        for sequence in live.sequences:
            ngram = executor = None
            if Drafter.NGRAM in wish.drafters:
                ngram = NgramDrafter(sequence.tokens, self._ngram_populations)
            if Drafter.EXECUTOR in wish.drafters:
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
        """Decide about all that could be in the next step and were not decided about yet.

        ahead: sequences may be a step ahead of what is known; those that get no drafts now will be.
        """
        self._lose_patience(now)
        self._undecided = False
        at_once: list[tuple[Sequence, DraftState, Candidate]] = []  # n-grams, or drafts that were made before
        to_ask: list[tuple[Sequence, DraftState, DraftCandidate]] = []
        index_budget = INDEX_BUDGET
        hurry = now + HURRY_STEPS * step_s
        automatic = min(self._config.max_draft_tokens, max_drafts)
        may_ask = self._caches.connected and not self._late
        decoding = State.RUNNING
        context = 0
        for sequence in running:
            context += sequence.kv
            track = sequence.draft_state
            if sequence.state is not decoding:
                if track is not None and track.ngram is not None and index_budget > 0:
                    index_budget -= track.ngram.update(index_budget)  # while the prompt is computed
                continue
            if track is None or sequence.in_flight or sequence.waiting:
                continue
            known = len(sequence.tokens)
            if track.decided_at == known:
                continue
            track.decided_at = known
            drafter = track.ngram
            if drafter is not None:
                index_budget -= drafter.update(index_budget if index_budget > 16 else 16)
            if track.drafts:
                track.keep(sequence.tokens)
            most = automatic if track.length is None else min(track.length, max_drafts)
            if known + most >= sequence.end_length:
                most = sequence.end_length - known - 1
            deadline = sequence.live.request.deadline
            if most < 1 or known < track.plain_until or (deadline is not None and deadline < hurry):
                track.drafts = ()
                continue
            if track.drafts and track.executor is not None:
                ready = track.executor.candidate(min(most, len(track.drafts)))
                assert ready is not None
                at_once.append((sequence, track, ready))
                continue
            ngram = None if drafter is None else drafter.candidate(most)
            asked = self._executor_candidate(sequence, track, most) if may_ask else None
            if asked is not None:
                to_ask.append((sequence, track, DraftCandidate(asked, ngram, self._caches.pending(sequence))))
            elif ngram is not None:
                at_once.append((sequence, track, ngram))
        base = Work(len(running), len(running), context)
        if to_ask:
            at_once += self._ask(to_ask, base, now)
        if at_once:
            self._propose(at_once, base)
        if ahead and not self._late:
            self._run_plainly(running)

    def _run_plainly(self, running: SequenceQueue) -> None:
        """Let those that were decided about and got no drafts run ahead, without drafts, for a while."""
        for sequence in running:
            track = sequence.draft_state
            if track is None or sequence.in_flight or sequence.waiting or track.length is not None:
                continue
            if track.decided_at == len(sequence.tokens) >= track.plain_until and not track.drafts:
                track.plain_until = track.decided_at + PLAIN_RUN

    def _executor_candidate(self, sequence: Sequence, track: DraftState, most: int) -> Candidate | None:
        if track.executor is None or track.losses >= MAX_DRAFT_LOSSES:
            return None
        return track.executor.candidate(min(most, self._caches.most_drafts(sequence)))

    def _ask(
        self, to_ask: list[tuple[Sequence, DraftState, DraftCandidate]], base: Work, now: float
    ) -> list[tuple[Sequence, DraftState, Candidate]]:
        """Let those wait whom drafts of the draft executor serve best; returns the others with n-grams."""
        others: list[tuple[Sequence, DraftState, Candidate]] = []
        automatic = [candidate for _, track, candidate in to_ask if track.length is None]
        lengths: Iterator[int] = iter(())
        if automatic:
            choice = self._controller.drafting(base, automatic)
            self._cohorts = choice.cohorts
            lengths = iter(choice.lengths)
        for sequence, track, candidate in to_ask:
            executor, ngram = candidate.executor, candidate.ngram
            if track.length is None:
                wanted = next(lengths)
            elif ngram is None or promise(executor, executor.most) >= promise(ngram, ngram.most):
                wanted = executor.most
            else:
                wanted = 0
            if wanted:
                track.wanted, track.since = wanted, now
                track.promise = promise(executor, wanted)
                sequence.waiting = True
                self._waiting[sequence] = None
            elif ngram is not None:
                others.append((sequence, track, ngram))
        return others

    def _propose(self, at_once: list[tuple[Sequence, DraftState, Candidate]], base: Work) -> None:
        """Choose how many of the drafts that are there are to be verified."""
        automatic = [candidate for _, track, candidate in at_once if track.length is None]
        lengths = iter(self._controller.lengths(base, automatic) if automatic else ())
        for sequence, track, candidate in at_once:
            count = next(lengths) if track.length is None else candidate.most
            if track.drafts:
                track.drafts = track.drafts[:count]
            elif count and track.ngram is not None:
                track.offer(track.ngram.drafts(count), len(sequence.tokens), Drafter.NGRAM)

    def holds(self, running: SequenceQueue, step_s: float, now: float) -> bool:
        """The next step is better made when those who wait have their drafts: one step then serves all.

        Sequences that have no drafts to wait for (p of them) would get two steps while those who wait
        (d expected tokens) get one, where each takes t and drafting u; together they get one in t + u:
        (p + d) / (t + u) >= (2 p + d) / (2 t).
        """
        if not self._waiting or self._cohorts > 1:
            return False
        plain = sum(1 for s in running if not s.waiting and not s.in_flight)
        expected = sum(s.draft_state.promise for s in self._waiting if s.draft_state is not None)
        return step_s * expected >= self.draft_step_s * (2 * plain + expected)

    def attach(
        self, rows: list[Row], fed: list[Sequence], tokens: int, pages: int, page_size: int
    ) -> tuple[int, int]:
        """Add drafts to the rows of a step as far as tokens and pages go, full acceptance reserved.

        Returns the tokens and pages that it took.
        """
        tokens_left, pages_left = tokens, pages
        decoding = State.RUNNING
        for row, sequence in zip(rows, fed, strict=True):
            track = sequence.draft_state
            if track is None:
                continue
            track.sent = None
            if not track.drafts or track.known != row.kv_length + 1 or sequence.state is not decoding:
                continue
            end = row.kv_length + 1
            room = -end % page_size + pages_left * page_size
            count = min(len(track.drafts), tokens_left, room)
            if count < 1:
                continue
            row.drafts = track.drafts[:count]
            track.sent = track.maker
            sequence.foreseen = False
            tokens_left -= count
            pages_left -= -(-(end + count) // page_size) + -end // page_size
        return tokens - tokens_left, pages - pages_left

    # -- what the target answered ----------------------------------------------------------------

    def refused(self, sequence: Sequence) -> None:
        """The target refused a row with drafts: its next one has none."""
        if sequence.draft_state is not None:
            sequence.draft_state.plain_until = len(sequence.tokens) + 1
            sequence.draft_state.drafts = ()

    @property
    def step_time(self) -> StepTime:
        """The target's."""
        return self._controller.target

    def timed(self, plan: Plan, seconds: float) -> Work:
        """The target took so long for a step; returns what the step computed."""
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
        """A draft executor is there."""
        return self._caches.connected

    def ready(self, capacity: Capacity) -> None:
        """One that holds nothing of ours is there. Raises IllegalEvent while another is."""
        if self._caches.connected:
            raise IllegalEvent("a draft executor is connected: it must be lost before another is ready")
        self._caches.ready(capacity)
        self._late = False

    def lost(self) -> None:
        """It is gone: those who wait decode plainly."""
        for sequence in self._caches.in_flight():
            if sequence.draft_state is not None:
                sequence.draft_state.losses += 1
        self._caches.lost()
        self._stop_waiting(list(self._waiting))

    def plan_draft(self, running: SequenceQueue, alone: bool, now: float) -> Plan | None:
        """The draft executor's next step, after `decide`; only releases while a suspect runs `alone`."""
        if not self._caches.connected or self._caches.step is not None:
            return None
        if alone:
            return self._caches.plan((), (), now)
        self._forget_gone()
        wanting = [(s, s.draft_state.wanted) for s in self._waiting if s.draft_state is not None]
        if self._cohorts > 1 and not any(self._on_its_way(s) for s in running):
            wanting = wanting[: -(-len(wanting) // 2)]
        following = (s for s in running if not s.waiting and self._follows(s))
        self._late = False
        plan = self._caches.plan(wanting, following, now)
        turned_away = [s for s, _ in wanting if not self._caches.has(s)]  # there was no room for them
        self._stop_waiting(turned_away)
        self._undecided |= bool(turned_away)
        return plan

    def apply_draft(self, result: Result, now: float) -> None:
        """Take the answer of the draft step. Raises UnknownStep."""
        step = self._caches.step
        drafted = self._caches.apply(result)
        assert step is not None
        seconds = now - step.sent_at
        if step.work.rows:
            self._controller.draft.observe(step.work, seconds)
            if self.draft_step_s:
                self.draft_step_s += 0.1 * (min(seconds, 4 * self.draft_step_s) - self.draft_step_s)
            else:
                self.draft_step_s = seconds
        self._late = False
        for made in drafted:
            sequence, track = made.sequence, made.sequence.draft_state
            assert track is not None
            track.losses = 0
            if made.drafts:
                track.offer(tuple(made.drafts), made.known, Drafter.EXECUTOR)
            if sequence.waiting and (not made.drafts or made.known == len(sequence.tokens)):
                self._stop_waiting([sequence])

    def next_wakeup(self, now: float) -> float | None:
        """When there is something to decide; None: only when something happens."""
        return now if self._undecided else self._patience_ends()

    def _patience_ends(self) -> float | None:
        """When the first of those who wait has waited enough; None: nobody waits."""
        self._forget_gone()
        first = next(iter(self._waiting), None)
        state = None if first is None else first.draft_state
        return None if state is None else state.since + self._patience_s

    @property
    def _patience_s(self) -> float:
        return max(MIN_PATIENCE_S, min(MAX_PATIENCE_S, PATIENCE_STEPS * self.draft_step_s))

    def _lose_patience(self, now: float) -> None:
        while (ends := self._patience_ends()) is not None and ends <= now:
            self._late = True
            self._stop_waiting([next(iter(self._waiting))])

    def _stop_waiting(self, sequences: Iterable[Sequence]) -> None:
        """They are decided about again."""
        for sequence in sequences:
            self._waiting.pop(sequence, None)
            if sequence.waiting and sequence.draft_state is not None:
                sequence.waiting = False
                sequence.draft_state.decided_at = -1

    def _forget_gone(self) -> None:
        """Those who gave up their target cache wait no more."""
        for sequence in [s for s in self._waiting if not s.waiting]:
            del self._waiting[sequence]

    def _follows(self, sequence: Sequence) -> bool:
        track = sequence.draft_state
        return track is not None and track.executor is not None and track.losses < MAX_DRAFT_LOSSES

    def _on_its_way(self, sequence: Sequence) -> bool:
        """It has drafts of the draft executor, and they are not verified yet."""
        track = sequence.draft_state
        if track is None:
            return False
        if sequence.in_flight:
            return track.sent is Drafter.EXECUTOR
        return bool(track.drafts) and track.maker is Drafter.EXECUTOR

    def check_integrity(self, running: SequenceQueue) -> None:
        """Raises AssertionError."""
        self._caches.check_integrity()
        self._forget_gone()
        waiting = {s for s in running if s.waiting}
        assert waiting == set(self._waiting), "somebody waits for drafts that nobody makes"
        assert not any(s.in_flight for s in waiting), "a sequence waits for drafts and for an answer"


def promise(candidate: Candidate, count: int) -> float:
    """Tokens that a verification of `count` drafts is expected to bring."""
    expected, chance = 1.0, candidate.first
    for _ in range(count):
        expected += chance
        chance *= candidate.later
    return expected
