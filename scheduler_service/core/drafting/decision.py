"""One decision: which of the awake sequences get drafts for their next row, how many, and which rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scheduler_service.core.drafting.draft_executor import DraftExecutor
from scheduler_service.core.drafting.rest_calendar import RestCalendar
from scheduler_service.core.request import DraftSource
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.speculation.controller import Candidate, Controller, DraftCandidate
from scheduler_service.core.speculation.draft_state import FREE_TOKENS, DraftState
from scheduler_service.core.speculation.drafters import NgramDrafter
from scheduler_service.core.speculation.ngram import SPARSE_STRIDE
from scheduler_service.core.speculation.step_time import Work
from scheduler_service.core.states import SequenceState

INDEX_BUDGET = 2048
"""Tokens that one decision adds to n-gram indexes, over all sequences: a long prompt takes several."""

MIN_INDEXED = 16
"""Tokens of one sequence that a decision indexes even if the budget is used up."""

PROMISING = 0.2
"""A sequence whose first draft is accepted with at least this probability does not rest. It got no drafts
because of what a step costs now, which changes with the load and is learned only by trying."""

SPARSE_REST = 16
"""The tokens of a rest of at least this many are indexed sparsely."""


class DraftDecision:
    """Looks at sequences (`consider`), then chooses for all of them together (`choose`)."""

    def __init__(
        self,
        controller: Controller,
        executor: DraftExecutor,
        calendar: RestCalendar,
        *,
        max_drafts: int,
        max_automatic: int,
        too_late: float,
        min_rest: int,
        max_rest: int,
        ahead: bool,
        drafts_ahead: bool,
    ) -> None:
        """max_drafts: that the target verifies in one row.
        max_automatic: the same for sequences whose number of drafts the controller chooses.
        too_late: a sequence with an earlier deadline (seconds, on the caller's clock) gets no drafts.
        min_rest, max_rest: bounds on the tokens that a sequence without drafts decodes plainly; the first one
        of those for whom the draft executor could draft.
        ahead: decide about sequences with unanswered rows, too.
        drafts_ahead: they may have drafts; else one for which drafts are promising waits for the answers.
        """
        self._ahead, self._drafts_ahead = ahead, drafts_ahead
        self._controller = controller
        self._executor = executor
        self._calendar = calendar
        self._max_drafts = max_drafts
        self._max_automatic = max_automatic
        self._too_late = too_late
        self._min_rest = min_rest
        self._max_rest = max_rest
        self._may_ask = executor.responsive
        self._index_budget = INDEX_BUDGET
        # Sequences that have drafts, or can have n-gram drafts.
        self._at_once: list[tuple[LiveSequence, DraftState, Candidate]] = []
        self._to_ask: list[tuple[LiveSequence, DraftState, DraftCandidate]] = []  # the draft executor
        self.offered: set[LiveSequence] = set()  # have drafts for their next row

    @property
    def open(self) -> bool:
        """Some sequence has a candidate, so there is something to choose."""
        return bool(self._at_once or self._to_ask)

    def consider(self, sequences: Iterable[tuple[LiveSequence, DraftState]]) -> None:
        """Find candidates of awake sequences that could be in the next step and have new tokens.

        A sequence without a cache is forgotten until it is opened again.
        """
        decoding = SequenceState.RUNNING
        for sequence, state in sequences:
            if sequence.state is decoding:
                if sequence.awaits_drafts or (sequence.in_flight and not self._may_go_ahead(sequence, state)):
                    continue
                known = len(sequence.tokens)
                at = known + sequence.ahead
                if state.decided_at != at or state.decided_with != known:
                    if at < state.plain_until:
                        continue
                    state.decided_at, state.decided_with = at, known
                    if sequence.in_flight:
                        self._find_ahead(sequence, state, at)
                    else:
                        self._find_candidate(sequence, state, known)
                elif state.drafts:
                    self.offered.add(sequence)  # its drafts have not been sent yet
            elif not sequence.cache_id:
                self._calendar.forget(sequence)
            elif state.ngram is not None and self._index_budget > 0:  # while the prompt is computed
                self._index_budget -= state.ngram.update(self._index_budget)

    def _find_candidate(self, sequence: LiveSequence, state: DraftState, known: int) -> None:
        """Find what drafts the sequence can have. One that can have none rests.

        The draft executor's drafts that are left go before those that its grammar forces if they say the same
        and more; n-grams, if they do not contradict it and promise more.
        """
        state.sent = None
        drafter = self._updated(state)
        forced = () if state.grammar is None else state.grammar.drafts(known)
        if state.executor is None and not forced and (drafter is None or not drafter.index.match_length):
            state.drafts = ()
            self._rest(sequence, state)
            return
        most = self._most(sequence, state, known)
        if most < 1:
            state.drafts = ()
            self._rest(sequence, state)
            return
        if state.drafts:
            state.keep(sequence.tokens)
            if state.drafts[: len(forced)] != forced:
                state.drafts = ()
            if state.drafts and state.executor is not None:
                ready = state.executor.candidate(min(most, len(state.drafts)))
                assert ready is not None
                self._take(sequence, state, ready)
                return
        at_once = None if drafter is None else drafter.candidate(most)
        if state.grammar is not None and (certain := state.grammar.candidate(known, most)) is not None:
            shared = min(certain.most, 0 if at_once is None else at_once.most)
            if (
                at_once is None
                or drafter is None
                or drafter.drafts(shared) != forced[:shared]
                or promise(at_once, at_once.most) <= promise(certain, certain.most)
            ):
                at_once = certain
                state.offer(forced[: certain.most], known, DraftSource.GRAMMAR)
        if state.executor is not None or (at_once is not None and at_once.first >= PROMISING):
            state.promising_at = known
        if self._may_ask and (asked := self._executor.candidate(sequence, state, most)) is not None:
            candidate = DraftCandidate(asked, at_once, self._executor.pending(sequence))
            self._to_ask.append((sequence, state, candidate))
        elif at_once is None:
            self._rest(sequence, state)
        else:
            self._take(sequence, state, at_once)

    def _updated(self, state: DraftState) -> NgramDrafter | None:
        """The sequence's n-gram drafter, which has learned from its new tokens."""
        drafter = state.ngram
        if drafter is not None:
            budget, stride = self._index_budget, state.index_stride
            self._index_budget = budget - drafter.update(
                budget if budget > MIN_INDEXED else MIN_INDEXED, stride
            )
            if stride > 1:
                state.index_stride = 1
        return drafter

    def _most(self, sequence: LiveSequence, state: DraftState, at: int) -> int:
        """Drafts that may follow the first `at` tokens."""
        most = self._max_automatic if state.length is None else min(state.length, self._max_drafts)
        deadline = sequence.live.request.deadline
        if deadline is not None and deadline < self._too_late:
            return 0
        return min(most, sequence.end_length - at - 1)

    def _may_go_ahead(self, sequence: LiveSequence, state: DraftState) -> bool:
        """Whether the row after unanswered ones can be decided about now.

        Not if the draft executor has drafts for it, or could make some: it is asked after known tokens.
        """
        if not (self._ahead and sequence.is_predictable):
            return False
        if len(sequence.tokens) + sequence.ahead >= sequence.end_length:
            return False
        if not self._drafts_ahead and (state.length is not None or sequence.ahead > sequence.in_flight):
            return False
        if state.drafts and state.maker is DraftSource.EXECUTOR:
            return False
        return not (self._may_ask and self._executor.candidate(sequence, state, 1) is not None)

    def _find_ahead(self, sequence: LiveSequence, state: DraftState, at: int) -> None:
        """Find drafts for a row after unanswered ones, which follows the first `at` tokens at most.

        They are those for where the unanswered rows are likely to end: after all their drafts, if what is
        drafted now still begins with these.
        """
        state.ahead_at = at
        state.drafts = ()
        drafter, most = self._updated(state), self._most(sequence, state, at)
        if most < 1:
            self._rest(sequence, state)
            return
        known, needed = len(sequence.tokens), sequence.ahead + most
        forced = () if state.grammar is None else state.grammar.drafts(known)
        if state.grammar is not None and len(forced) > sequence.ahead:
            found, maker = state.grammar.candidate(known, needed), DraftSource.GRAMMAR
        else:
            found, maker = None if drafter is None else drafter.candidate(needed), DraftSource.NGRAM
        if found is None:
            self._rest(sequence, state)
            return
        is_promising = found.first >= PROMISING
        if is_promising:
            state.promising_at = known
        if not self._drafts_ahead:
            if is_promising:
                state.ahead_at = -1  # no row before the answers, with which it is decided about again
            else:
                self._rest(sequence, state)
            return
        tokens = forced
        if maker is DraftSource.NGRAM:
            assert drafter is not None
            tokens = drafter.drafts(needed)
        rows, drafts = sequence.in_flight, sequence.open_drafts
        passed = rows if drafts is None else drafts.expected(tokens, rows)
        state.offer(tokens[passed : passed + most], at, maker)
        chance = found.first * found.later**passed
        self._take(sequence, state, Candidate(chance, found.later, len(state.drafts)))

    def _take(self, sequence: LiveSequence, state: DraftState, candidate: Candidate) -> None:
        """Use drafts that need no draft step: as many as the request fixes; else the controller chooses."""
        if state.length is None:
            self._at_once.append((sequence, state, candidate))
        else:
            self._offer(sequence, state, candidate.most)

    def choose(self, base: Work, now: float) -> None:
        """Give drafts to those sequences with a candidate whose drafts pay off; the others rest.

        base: a target step without drafts in which all running sequences decode.
        """
        if self._to_ask:
            self._ask(base, now)
        if self._at_once:
            self._propose(base)

    def _ask(self, base: Work, now: float) -> None:
        """Ask the draft executor for the sequences whom its drafts serve best; others have theirs at once."""
        automatic = [candidate for _, state, candidate in self._to_ask if state.length is None]
        lengths: Iterator[int] = iter(())
        if automatic:
            chosen = self._controller.drafting(base, automatic)
            self._executor.cohorts = chosen.cohorts
            lengths = iter(chosen.lengths)
        for sequence, state, candidate in self._to_ask:
            executor, at_once = candidate.executor, candidate.at_once
            if state.length is None:
                wanted = next(lengths)
            elif at_once is None or promise(executor, executor.most) > promise(at_once, at_once.most):
                wanted = executor.most
            else:
                wanted = 0
            if wanted:
                state.drafts = ()
                self._executor.ask(sequence, state, wanted, promise(executor, wanted), now)
            elif at_once is not None:
                self._take(sequence, state, at_once)
            else:
                self._rest(sequence, state)

    def _propose(self, base: Work) -> None:
        """Choose how many drafts of each sequence are verified, of those that need no draft step."""
        lengths = self._controller.lengths(base, [candidate for _, _, candidate in self._at_once])
        for (sequence, state, _), length in zip(self._at_once, lengths, strict=True):
            if length:
                self._offer(sequence, state, length)
                continue
            state.drafts = ()
            self._rest(sequence, state)

    def _offer(self, sequence: LiveSequence, state: DraftState, count: int) -> None:
        """Let the next row of the sequence have `count` drafts."""
        if state.drafts:
            state.drafts = state.drafts[:count]
        elif state.ngram is not None:
            state.offer(state.ngram.drafts(count), state.decided_at, DraftSource.NGRAM)
        self.offered.add(sequence)

    def _rest(self, sequence: LiveSequence, state: DraftState) -> None:
        """Let a sequence that got no drafts decode some tokens without any: it rests.

        It does not rest if its number of drafts is fixed, or if it had a promising candidate within the last
        FREE_TOKENS tokens, unless the configuration demands rests (min_rest). Cache ids spread the ends of
        rests over steps.
        """
        asks = state.executor is not None and self._executor.connected
        min_rest = self._min_rest if asks else 0
        if state.decided_at - state.promising_at <= FREE_TOKENS and not min_rest:
            return
        if state.length is None:
            rest = state.rest(min_rest, self._max_rest, sequence.cache_id)
            if rest > 1:
                self._calendar.rest(sequence, rest)
            if rest >= SPARSE_REST:
                state.index_stride = SPARSE_STRIDE


def promise(candidate: Candidate, count: int) -> float:
    """Tokens that a verification of `count` drafts is expected to emit, the target's own one included."""
    expected, chance = 1.0, candidate.first
    for _ in range(count):
        expected += chance
        chance *= candidate.later
    return expected
