"""`Pipeline`: the steps in flight on one device, from their request to their answer.

    begin          check the header, apply the ops, reserve the rows, launch their forward
    finish_oldest  wait for the forward, commit the rows, answer
    take_finished  the answers

Two steps can be in flight on a backend that computes while the host goes on: one computes, the other is
queued after it. A step is begun while another is in flight only where that one's outcome cannot change it
(`overlap.py`), so that the results are those of one step after another. On any other backend a step is
finished as soon as it is begun.

The mask of a sequence with a grammar follows from its last token. Where nothing else is to be done it is
computed when that token is known (`prepare_next_mask`), and not when the next step waits for it.

A step that takes several forwards is computed while it is begun, with nothing else in flight. `begin` is
suspended before each of these forwards, and resumed with whether a client still waits for the step. If none
does, an abandonable step is undone as a whole, its ops included (`savepoint.py`).
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress

from executor_service.backends.base import Backend, ComputedForward, PendingForward
from executor_service.backends.forward_rows import ForwardOutputs
from executor_service.cache.sequence import CachedSequence
from executor_service.cache.sequence_store import SequenceStore
from executor_service.cache.session import ClientSession
from executor_service.contract.plan import Abandoned, Forwards, StepPlan, StepResult
from executor_service.steps.commit import StepCommit
from executor_service.steps.counters import StepCounters
from executor_service.steps.forwards import compute, launch
from executor_service.steps.masking import bring_masks, prepare_mask
from executor_service.steps.overlap import must_wait
from executor_service.steps.pieces import may_take_several
from executor_service.steps.reservation import RowReservation
from executor_service.steps.savepoint import Savepoint
from executor_service.steps.step_in_flight import FinishedStep, StepInFlight, StepRequest
from executor_service.steps.step_rows import StepRows

MAX_STEPS_IN_FLIGHT = 2
"""One computes, one is queued. A third would mostly compute rows of sequences that have already ended."""


class Pipeline:
    """The queue of the steps in flight, oldest first. All methods: device thread."""

    def __init__(self, store: SequenceStore, backend: Backend, counters: StepCounters) -> None:
        self._store, self._backend, self._counters = store, backend, counters
        self._max_piece_tokens = store.limits.max_piece_tokens
        self._depth = min(backend.max_pending_forwards, MAX_STEPS_IN_FLIGHT)
        self._in_flight: deque[StepInFlight] = deque()
        # Rows of the step whose forward is being launched, and of that whose forward is awaited or committed.
        self._launching: StepRows | None = None
        self._finishing: StepRows | None = None
        self._finished: list[FinishedStep] = []
        # Sequences with a grammar and new tokens, of the last commit that had any.
        self._unprepared: deque[CachedSequence] = deque()
        self._finished_s = 0.0  # when the last step was finished, by `time.perf_counter`
        self._free_by_commits = self._cached_by_commits = 0  # net change of these pages by all commits so far

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._in_flight)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step has to be finished before another can be begun."""
        return len(self._in_flight) >= self._depth

    @property
    def oldest_forward(self) -> PendingForward | None:
        """The forward of the oldest step in flight; None: nothing is in flight."""
        return self._in_flight[0].forward if self._in_flight else None

    @property
    def oldest_rows(self) -> StepRows | None:
        """The rows of the step that has had the device for longest; None: there is none. Any thread."""
        if (finishing := self._finishing) is not None:
            return finishing
        with suppress(IndexError):
            return self._in_flight[0].rows
        return self._launching

    def begin(self, request: StepRequest) -> Forwards[None]:
        """Begin a step, after finishing those that must be finished first.

        A step of one forward never suspends this. A replay is finished at once, with the stored result.
        Raises RequestRefused when nothing was done, and Abandoned when everything was undone; any other
        exception is fatal.
        """
        plan, store = request.plan, self._store
        store.check_epoch(plan.epoch)
        session = store.sessions.get(plan.session_id, request.caller)
        undoable = request.abandonable and may_take_several(plan, session, self._max_piece_tokens)
        self._make_room(plan, session, alone=undoable)
        if (stored := session.replay(plan)) is not None:
            self._finished.append(FinishedStep(request, stored))
            return
        began_s, now_s = time.perf_counter(), session.renewed_s
        store.replays.begin_step()
        savepoint = Savepoint(session, plan, store) if undoable else None
        ops = [store.apply(session, op, now_s) for op in plan.ops]
        try:
            rows, forward = yield from self._launch(plan, session, now_s, savepoint)
        except Abandoned:
            self._counters.steps_abandoned += 1
            self._counters.compute_s += time.perf_counter() - began_s
            raise
        session.advance(plan)
        free = store.pages.free - self._free_by_commits
        cached = store.pages.cached - self._cached_by_commits
        self._in_flight.append(StepInFlight(request, session, ops, rows, forward, began_s, free, cached))
        if self._depth == 1 or isinstance(forward, ComputedForward):
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Wait for the oldest step's forward, commit its rows, and make its answer."""
        self._finishing = self._in_flight[0].rows
        step = self._in_flight.popleft()
        outputs = step.forward.outputs()
        commit = self._commit(step, outputs)
        result = self._result(step, commit)
        step.session.remember(step.request.plan, result, self._store.limits.max_in_flight)
        self._finished.append(FinishedStep(step.request, result))
        self._finishing = None

    def take_finished(self) -> list[FinishedStep]:
        """The steps finished since the last call, in the order in which they were begun."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def has_unprepared(self) -> bool:
        """Whether `prepare_next_mask` has something to do."""
        return bool(self._unprepared)

    @property
    def has_replays(self) -> bool:
        """Whether `go_on_replaying` has something to do."""
        return self._store.replays.unfinished

    def prepare_next_mask(self) -> None:
        """Compute one mask that the next steps are likely to need, if there is one left.

        Nothing depends on it: a row asks its automaton for its mask, which then is there already.
        """
        if self._unprepared:
            prepare_mask(self._unprepared.popleft())

    def go_on_replaying(self) -> float:
        """Replay a little of an output whose opening or fork was refused, and is likely to be tried again.

        Returns the seconds that it took.
        """
        return self._store.replays.go_on()

    def settle(self) -> None:
        """Finish all steps in flight."""
        while self._in_flight:
            self.finish_oldest()

    def renew_leases(self) -> None:
        """Renew the leases of all steps in flight, so that none runs out meanwhile."""
        for step in self._in_flight:
            self._renew_leases_of(step)

    def _make_room(self, plan: StepPlan, session: ClientSession, *, alone: bool) -> None:
        """Finish steps in flight until this one can be begun beside the rest of them, or alone."""
        while self.is_full:
            self.finish_oldest()
        if self._in_flight and (
            alone
            or not session.is_next(plan)
            or must_wait(plan, session, self._in_flight[-1].rows, self._store.pages.page_size)
        ):
            self.settle()

    def _launch(
        self, plan: StepPlan, session: ClientSession, now_s: float, savepoint: Savepoint | None
    ) -> Forwards[tuple[StepRows, PendingForward]]:
        """Reserve the rows and launch their forward, or compute them if they take several.

        Raises Abandoned after undoing the step.
        """
        store = self._store
        rows = self._reserve(session, plan, now_s)
        if self._in_flight and (rows.has_refusals or rows.needs_several(self._max_piece_tokens)):
            # A step in flight may give back what a row was refused for.
            rows.undo(store)
            self.settle()
            rows = self._reserve(session, plan, now_s)
        elif savepoint is not None and savepoint.holds_pages and rows.lacks_memory:
            # The savepoint may hold the very pages that are missing: then the step cannot be abandoned.
            rows.undo(store)
            savepoint.discard()
            savepoint = None
            rows = self._reserve(session, plan, now_s)
        self._launching = rows
        forward: PendingForward
        max_tokens, abandonable = self._max_piece_tokens, savepoint is not None
        try:
            if rows.needs_several(max_tokens):
                rows.make_objects()
                forward = yield from compute(
                    self._backend, rows.accepted, max_tokens, abandonable=abandonable
                )
            else:
                forward = launch(self._backend, rows)
        except Abandoned:
            assert savepoint is not None
            rows.undo(store)
            savepoint.restore()
            raise
        finally:
            self._launching = None
        if savepoint is not None:
            savepoint.discard()
        return rows, forward

    def _reserve(self, session: ClientSession, plan: StepPlan, now_s: float) -> StepRows:
        ahead = self._in_flight[-1].rows if self._in_flight else None
        return RowReservation(session, plan, self._store, self._backend, now_s, ahead).reserve()

    def _commit(self, step: StepInFlight, outputs: ForwardOutputs) -> StepCommit:
        """Commit a step's rows, then settle the steps in flight with what these have become.

        A row that continues an undone one is refused. A row with a grammar gets its masks, which needed the
        committed tokens; it is refused, or loses drafts, where the grammar does not allow them.
        """
        pages = self._store.pages
        free, cached = pages.free, pages.cached
        next_rows = self._in_flight[0].rows if self._in_flight else None
        commit = StepCommit(step.rows, self._store, next_rows)
        commit.take(outputs)
        if commit.constrained:
            self._unprepared = deque(commit.constrained)
        for later in self._in_flight:
            later.rows.refuse_followers(commit.undone)
            held = pages.free
            bring_masks(later.rows, later.forward, self._store)
            commit.freed_behind += pages.free - held
        self._free_by_commits += pages.free - free
        self._cached_by_commits += pages.cached - cached
        self._renew_leases_of(step)
        return commit

    def _result(self, step: StepInFlight, commit: StepCommit) -> StepResult:
        """The answer. Its page counts leave out what later steps have reserved meanwhile."""
        now_s, rows = time.perf_counter(), step.rows.results
        on_device_s = max(step.began_s, self._finished_s)
        queued_s, elapsed_s = on_device_s - step.request.arrived_s, now_s - on_device_s
        self._finished_s = now_s
        self._counters.add_step(commit.tally, elapsed_s, rows, step.ops)
        free = step.free_pages + self._free_by_commits - commit.freed_behind
        cached = step.cached_pages + self._cached_by_commits
        return StepResult(step.ops, rows, free, cached, int(queued_s * 1e6), int(elapsed_s * 1e6))

    def _renew_leases_of(self, step: StepInFlight) -> None:
        step.session.renewed_s = now_s = self._store.clock()
        if not step.session.id:
            for sequence in step.rows.sequences:
                sequence.renewed_s = now_s
