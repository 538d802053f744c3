"""The scheduler core's whole surface: what happens goes in, plans and events come out.

    scheduler = StepScheduler(CoreConfig())
    scheduler.executor_ready(capacity, now)
    scheduler.add(request, now)
    while True:
        deliver(scheduler.expire(now))           # deadlines, failover timeout
        plan = scheduler.plan(now)               # None: nothing to do until something happens
        if plan: result = executor.step(plan)    # the caller's business
        deliver(scheduler.apply(result, now))

Not thread-safe; one caller. `now` is the caller's clock in seconds and never runs backwards.
Everything here returns at once; a method that raises has changed nothing. Each request ends once:
with a `CompletionEnded` for each completion, or with one `Failed`; nothing is emitted for it afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import nlargest

from scheduler_service.core.admission import Admission
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.drafting.speculator import Speculator
from scheduler_service.core.errors import AdmissionError, IllegalEvent, NotReady
from scheduler_service.core.events import CompletionEnded, EndReason, Event, Failed, Failure
from scheduler_service.core.forecast import Forecast
from scheduler_service.core.in_flight import StepsInFlight
from scheduler_service.core.planner import StepBuilder
from scheduler_service.core.policy import JointLimits
from scheduler_service.core.registry import Registry, max_tokens, misfit
from scheduler_service.core.request import Request
from scheduler_service.core.result_reader import ResultReader
from scheduler_service.core.schedule import Schedule
from scheduler_service.core.sequence import LiveSequence
from scheduler_service.core.sequence_pool import ISOLATION_LOSSES, SequencePool
from scheduler_service.core.snapshot import Share, Snapshot, Totals
from scheduler_service.core.states import SequenceState
from scheduler_service.core.step import Capacity, PlannedStep, StepAnswer
from scheduler_service.core.stranded import StrandedRequests

RETRY_S = 0.02
"""After an executor was short of pages or sequences: how long until more is asked of it."""


class StepScheduler:
    """Decides which sequence computes which tokens in which step."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._counters = Totals()
        self._pool = SequencePool()
        self._speculator = Speculator(config)
        self._forecast = Forecast(self._speculator.step_time)
        self._admission = Admission(config, self._pool, self._forecast)
        self._registry = Registry(
            config, self._pool, self._speculator, self._admission, self._forecast, self._counters
        )
        self._reader = ResultReader(config, self._registry, self._pool, self._speculator, self._counters)
        self._capacity: Capacity | None = None
        self._limits: JointLimits | None = None
        self._connected = False
        self._retiring = False  # connected, and takes no openings any more
        self._stranded = StrandedRequests(config.failover_timeout_s)
        self._in_flight = StepsInFlight()
        self._free_pages = 0  # as of the last reply
        self._evictable_pages = 0
        self._retry_at = 0.0
        self._outbox: list[Event] = []  # what `plan` found out, for the next `expire` or `apply`
        self._applied_at = 0.0

    # -- what is known ---------------------------------------------------------------------------

    @property
    def capacity(self) -> Capacity | None:
        """The connected (or last connected) executor's; None before the first."""
        return self._capacity

    @property
    def connected(self) -> bool:
        """An executor is there."""
        return self._connected

    @property
    def holds_caches(self) -> bool:
        """Some sequence has a cache on the executor."""
        return len(self._pool.running) > 0

    @property
    def max_request_tokens(self) -> int:
        """Most tokens (prompt + max_tokens) that a request may have; 0 before the first executor."""
        return self._limits.request_tokens if self._limits else 0

    @property
    def is_contested(self) -> bool:
        """Several identities have requests that have not ended."""
        return self._pool.queue.contested

    def live(self, request_id: str) -> bool:
        """The request was taken and has not ended."""
        return self._registry.get(request_id) is not None

    def snapshot(self) -> Snapshot:
        """Live figures and counters."""
        pool = self._pool
        self._counters.preemptions = pool.preemptions
        waiting_tokens = pool.queue.waiting_tokens + pool.held_tokens
        return Snapshot(
            executor=self._connected,
            running=len(pool.running),
            waiting=len(pool.queue) + pool.held,
            waiting_tokens=waiting_tokens,
            uncomputed_tokens=waiting_tokens + sum(len(s.tokens) - s.kv for s in pool.running),
            page_size=self._limits.page_size if self._limits else 0,
            max_sequences=self._limits.max_sequences if self._limits else 0,
            in_flight=len(self._in_flight),
            total_pages=self._limits.total_pages if self._limits else 0,
            free_pages=self._free_pages,
            evictable_pages=self._evictable_pages,
            step_s=self._forecast.step_s,
            step_rows=self._forecast.step_rows,
            draft_executor=self._speculator.connected,
            draft_step_s=self._speculator.draft_step_s,
            counters=replace(self._counters),
        )

    def shares(self, most: int) -> list[Share]:
        """What the identities that were served most have and had, at most so many."""
        return [
            Share(a.identity, a.taken, a.refused, a.tokens, a.running, a.queued_requests)
            for a in nlargest(most, self._pool.queue.accounts, key=lambda a: (a.tokens, a.identity))
        ]

    def check_integrity(self) -> None:
        """Compare all bookkeeping with itself. Raises AssertionError naming what is wrong."""
        self._registry.check_integrity()
        self._speculator.check_integrity(self._pool.running)
        for sequence in self._pool.running:
            rows = self._in_flight.rows_of(sequence.cache_id)
            assert sequence.in_flight == rows, f"{sequence.key} awaits {sequence.in_flight} of {rows} answers"
        assert self._connected or not self._in_flight, "a step is in flight, and no executor is connected"

    # -- requests --------------------------------------------------------------------------------

    def add(self, request: Request, now: float, *, replaces: bool = False) -> list[Event]:
        """Take a request into the queue, also while no executor is connected.

        `replaces`: in the place of the live request of the same id, which is cancelled, and only once this
        one is taken. The events are ends of completions that had all their tokens elsewhere
        (`Request.continued`). Raises NotReady, IdInUse, NeverFits, NoRoom, QuotaUsed, TooLate.
        """
        replaced = self._registry.get(request.id) if replaces else None
        try:
            if self._limits is None:
                raise NotReady("no executor has been seen yet")
            is_trial = self._registry.check(
                request, self._limits, now, connected=self._connected, replaced=replaced
            )
        except AdmissionError:
            self._refused(request.identity)
            raise
        if replaced is not None:
            self._registry.fail(replaced, Failure.CANCELLED, "replaced", now)
        live = self._registry.add(request, self._limits, now, is_trial=is_trial)
        if not self._connected or self._retiring:
            self._stranded.strand(live, now)
        self._counters.requests += 1
        self._counters.prompt_tokens += len(request.prompt)
        return self._registry.take_over(live, now) if request.continued else []

    def max_tokens(self, request: Request) -> int:
        """Most output tokens of each completion of a request that was taken."""
        return 0 if self._limits is None else max_tokens(request, self._limits)

    def check_room(
        self,
        identity: str,
        now: float,
        prompt_tokens_estimate: int = 0,
        deadline: float | None = None,
        weight: float = 1.0,
    ) -> None:
        """Raise what `add` would, for a request of which no more is known; a refusal is counted.

        Raises NotReady, NoRoom, QuotaUsed, TooLate. What it costs does not grow with the queue.
        """
        try:
            if self._limits is None:
                raise NotReady("no executor has been seen yet")
            self._admission.check_room(identity, weight, prompt_tokens_estimate)
            if self._connected:
                self._admission.check_deadline(
                    identity, weight, prompt_tokens_estimate, deadline, None, self._limits, now
                )
        except AdmissionError:
            self._refused(identity)
            raise

    def _refused(self, identity: str) -> None:
        self._counters.refused += 1
        if (account := self._pool.queue.account(identity)) is not None:
            account.refused += 1

    def cancel(self, request_id: str, now: float, message: str = "cancelled") -> Failed | None:
        """End a request; None if it is not live. No later plan has it."""
        live = self._registry.get(request_id)
        return None if live is None else self._registry.fail(live, Failure.CANCELLED, message, now)

    def stop(self, request_id: str, index: int, now: float) -> CompletionEnded | None:
        """End a completion well: the front end found a stop string. None if it is not live."""
        live = self._registry.get(request_id)
        if live is None or not 0 <= index < len(live.sequences):
            return None
        sequence = live.sequences[index]
        if sequence.state is SequenceState.ENDED:
            return None
        return self._registry.finish(sequence, EndReason.STOP_STRING, None, now)

    # -- executors -------------------------------------------------------------------------------

    def executor_ready(self, capacity: Capacity, now: float) -> list[Event]:
        """An executor with no cache of ours is there. Fails the requests that don't fit it.

        Raises IllegalEvent while one is connected.
        """
        if self._connected:
            raise IllegalEvent("an executor is connected: it must be lost before another is ready")
        self._capacity = capacity
        self._limits = limits = JointLimits.of(self._config, capacity)
        self._connected = True
        self._stranded.relieve()
        self._free_pages, self._evictable_pages = capacity.total_pages, 0
        self._retry_at = now
        events: list[Event] = []
        for live in list(self._registry):
            if why := misfit(live.request, limits):
                events.append(self._registry.fail(live, Failure.REFUSED, f"{why[0]} {why[1]}", now))
                continue
            live.set_max_tokens(max_tokens(live.request, limits))
            for sequence in live.sequences:
                if sequence.state is not SequenceState.ENDED and len(sequence.tokens) >= sequence.end_length:
                    events.append(self._registry.finish(sequence, EndReason.LENGTH, None, now))
        return events

    def executor_retires(self) -> None:
        """It takes no openings from now on; what has a cache there goes on. The others wait for another
        executor, for at most `failover_timeout_s`. Does nothing while none is connected.
        """
        self._retiring = self._connected

    def executor_lost(self, now: float) -> list[Event]:
        """The executor and all caches are gone; steps in flight will never be answered.

        All sequences go back to their places in the queue. One that was in flight at two losses
        without a new token in between runs alone until it has one; a third loss ends it. Afterwards
        `apply` of an old step raises UnknownStep. Does nothing while none is connected.
        """
        if not self._connected:
            return []
        self._connected = self._retiring = False
        for live in self._registry:
            self._stranded.strand(live, now)
        self._forecast.interrupted()
        self._counters.executor_losses += 1
        present = [sequence for sequence in self._pool.running if sequence.in_flight]
        self._in_flight.clear()
        self._pool.lose_all()
        events: list[Event] = []
        for sequence in present:
            if sequence.state is SequenceState.ENDED:
                continue  # with a sibling
            losses = sequence.lose_executor()
            if losses > ISOLATION_LOSSES:
                message = f"{losses} executors were lost while they computed it"
                events.append(self._registry.fail(sequence.live, Failure.POISON, message, now))
            elif losses == ISOLATION_LOSSES:
                self._pool.isolate(sequence)
        return events

    # -- the draft executor ----------------------------------------------------------------------

    def draft_ready(self, capacity: Capacity) -> None:
        """A draft executor with no cache of ours is there. Raises IllegalEvent while one is."""
        self._speculator.ready(capacity)

    def draft_lost(self) -> None:
        """It is gone with all that it held; sequences decode plainly. Does nothing while there is none.

        Afterwards `apply_draft` of an old step raises UnknownStep.
        """
        self._speculator.lost()

    def plan_draft(self, now: float) -> PlannedStep | None:
        """The draft executor's next step, which the caller must send; None: nothing to send now.

        At most one is in flight. Ask after every `plan` or right before it, and after `apply_draft`. Both
        decide who waits for drafts; `plan` leaves those out. Look at `next_wakeup` afterwards.
        """
        if not self._speculator.connected:
            return None
        self._decide(now)
        return self._speculator.plan_draft(self._pool.running, now, alone=bool(self._pool.isolated))

    def apply_draft(self, result: StepAnswer, now: float) -> None:
        """Take the draft step's answer; ask `plan` afterwards.

        Raises UnknownStep when it answers no step: such an executor is to be lost.
        """
        self._speculator.apply_draft(result, now)

    def _decide(self, now: float) -> None:
        if self._pool.isolated or not self._pool.speculating:
            return
        if self._connected and self._limits and self._capacity:
            self._speculator.decide(
                self._pool.running,
                self._capacity.max_drafts,
                self._forecast.step_s,
                now,
                ahead=self._limits.in_flight > 1,
            )

    # -- time ------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Event]:
        """Fail what has reached its deadline or waited too long for an executor.

        Call it right before `plan`, with the same `now`.
        """
        self._expire(now)
        return self._take_outbox()

    def next_wakeup(self, now: float) -> float | None:
        """When `expire` or `plan` next has something to do by itself, on the caller's clock; None: never."""
        times = [now] if self._outbox else []
        if (deadline := self._registry.next_deadline()) is not None:
            times.append(deadline)
        if not self._connected or self._retiring:
            if (ends := self._stranded.ends()) is not None:
                times.append(ends)
        elif self._retry_at > now and not self._in_flight and len(self._registry):
            times.append(self._retry_at)
        if (draft := self._speculator.next_wakeup(now)) is not None:
            times.append(draft)
        return min(times, default=None)

    def _expire(self, now: float) -> None:
        for live in self._registry.past_deadline(now):
            self._outbox.append(self._registry.fail(live, Failure.DEADLINE, "its deadline has passed", now))
        if self._retiring:
            for live in self._registry:
                if not any(sequence.cache_id for sequence in live.sequences):
                    self._stranded.strand(live, now)  # queued, or preempted meanwhile
        for live in self._stranded.overdue(now):
            message = f"no executor for {self._config.failover_timeout_s:g} s"
            self._outbox.append(self._registry.fail(live, Failure.NO_EXECUTOR, message, now))

    def _take_outbox(self) -> list[Event]:
        events, self._outbox = self._outbox, []
        return events

    # -- steps -----------------------------------------------------------------------------------

    def plan(self, now: float) -> PlannedStep | None:
        """The next step, which the caller must send; None if there is nothing to send now.

        After None, ask again when anything has happened, or at `next_wakeup`. With
        as many steps unanswered as there may be it is None.
        """
        self._expire(now)
        if not self._connected or self._limits is None or len(self._in_flight) >= self._limits.in_flight:
            return None
        alone = bool(self._pool.isolated)
        if alone and self._in_flight:
            return None
        pages = max(0, self._free_pages + self._evictable_pages - self._in_flight.pages)
        builder = StepBuilder(
            self._pool,
            self._limits,
            pages,
            self._in_flight,
            self._admission,
            lambda late: self._give_up(late, now),
            now,
            may_ask=now >= self._retry_at and not self._retiring,
        )
        if alone:
            builder.fill_alone(self._pool.isolated[0])
        elif not self._pool.speculating:
            builder.fill()
        else:
            self._speculate(builder, now)
        return self._send(builder.schedule, pages, now)

    def _give_up(self, late: LiveSequence, now: float) -> None:
        """Its turn has come, but it can't meet its deadline any more: end it rather than compute in vain."""
        message = "it could not have been done by its deadline"
        self._outbox.append(self._registry.fail(late.live, Failure.DEADLINE, message, now))

    def _speculate(self, builder: StepBuilder, now: float) -> None:
        """Fill a step in which some want drafts; leave it empty if it is better made with them."""
        self._decide(now)
        if self._speculator.holds(self._pool.running, self._forecast.step_s):
            return
        builder.fill()
        builder.attach_drafts(self._speculator)

    def _send(self, schedule: Schedule, pages: int, now: float) -> PlannedStep | None:
        releases = self._pool.take_releases()
        if schedule.empty and not releases:
            return None
        for opening in schedule.openings:
            self._registry.start(opening.sequence.live, now)
            self._speculator.opened(opening.sequence)
        for fork in schedule.forks:
            self._speculator.opened(fork.sequence)
        return self._in_flight.send(schedule, releases, pages - schedule.pages_left, now)

    def apply(self, result: StepAnswer, now: float) -> list[Event]:
        """Take a step's answer; steps are answered in order.

        Raises UnknownStep when it answers no step, or another one: such an executor is to be lost.
        A token that ends a completion (eos or a stop token) is in `Tokens.ids`, counts as a
        completion token, and is `CompletionEnded.matched_id`: front ends leave it out of the text.
        """
        step = self._in_flight.take(result)
        rows = len(result.rows)
        self._free_pages, self._evictable_pages = result.free_pages, result.evictable_pages
        self._counters.steps += 1
        self._counters.rows += rows
        if rows:
            took = now - max(step.sent_at, self._applied_at)
            self._forecast.stepped(took, rows)
        self._applied_at = now
        work = None
        if rows and (self._pool.speculating or self._registry.deadlines):
            work = self._speculator.stepped(step.plan, took, always=bool(self._registry.deadlines))
        emitted = self._counters.completion_tokens
        events, short = self._reader.read(step, result, now)
        if work is not None:
            emitted = self._counters.completion_tokens - emitted
            self._forecast.worked(work, len(step.plan.openings), emitted)
        if short:
            self._retry_at = now + RETRY_S
        return self._take_outbox() + events if self._outbox else events
