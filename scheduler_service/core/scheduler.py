"""The scheduler core's whole surface: calls say what happened, and return plans and events.

    scheduler = StepScheduler(CoreConfig())
    scheduler.executor_ready(capacity, now)
    scheduler.add(request, now)
    while True:
        deliver(scheduler.expire(now))           # deadlines, failover timeout
        plan = scheduler.plan(now)               # None: nothing to send until the next call or wakeup
        if plan:
            result = executor.step(plan)         # the caller's part
            deliver(scheduler.apply(result, now))

Not thread-safe. `now` is the caller's clock in seconds and never runs backwards. Each method returns at once;
one that raises has changed nothing but counters. Each request ends once: with a `CompletionEnded` for each
completion, or with one `Failed`; no event of it follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

from scheduler_service.core.admission import Admission
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.dispatcher import Dispatcher
from scheduler_service.core.drafting.speculator import Speculator
from scheduler_service.core.errors import AdmissionError, NotReady
from scheduler_service.core.events import CompletionEnded, EndReason, Event, Failed, Failure
from scheduler_service.core.expiry import Expiry
from scheduler_service.core.figures import count_adapters, count_reasons, largest_shares, take_snapshot
from scheduler_service.core.forecast import Forecast
from scheduler_service.core.joint_limits import JointLimits
from scheduler_service.core.registry import Registry, max_tokens
from scheduler_service.core.request import Request
from scheduler_service.core.result_reader import ResultReader, Shortage
from scheduler_service.core.sequence_pool import SequencePool
from scheduler_service.core.snapshot import AdapterUse, Share, Snapshot, Totals
from scheduler_service.core.states import SequenceState
from scheduler_service.core.step import Capacity, PlannedStep, StepAnswer
from scheduler_service.core.step_log import StepLog
from scheduler_service.core.target_executor import TargetExecutor
from scheduler_service.core.wait_report import WaitReport, is_slow, report
from scheduler_service.core.waiting.course import Course
from scheduler_service.core.waiting.reasons import WaitReason
from scheduler_service.core.watchdog import Fault, Watchdog


class StepScheduler:
    """Decides which sequence computes which tokens in which step."""

    def __init__(self, config: CoreConfig) -> None:
        self._counters = Totals()
        self._pool = SequencePool(config.release_wait_s)
        self._waits = self._pool.waits
        self._speculator = Speculator(config)
        self._forecast = Forecast(self._speculator.step_time)
        self._admission = Admission(config, self._pool, self._forecast)
        self._registry = Registry(
            config, self._pool, self._speculator, self._admission, self._forecast, self._counters
        )
        self._reader = ResultReader(config, self._registry, self._pool, self._speculator, self._counters)
        self._target = TargetExecutor(config)
        self._watchdog = Watchdog(config.watchdog_s, self._pool, self._target)
        self._expiry = Expiry(config.failover_timeout_s, self._registry, self._target)
        self._dispatcher = Dispatcher(
            self._pool,
            self._registry,
            self._target,
            self._expiry,
            self._admission,
            self._forecast,
            self._speculator,
        )

    # -- state -----------------------------------------------------------------------------------

    @property
    def capacity(self) -> Capacity | None:
        """Of the connected, or the last connected executor; None before the first."""
        return self._target.capacity

    @property
    def connected(self) -> bool:
        """An executor is connected."""
        return self._target.connected

    @property
    def holds_caches(self) -> bool:
        """Some sequence has a cache in the executor."""
        return len(self._pool.running) > 0

    @property
    def max_request_tokens(self) -> int:
        """Most tokens (prompt + max_tokens) that a request may have; 0 before the first executor."""
        return self._target.limits.request_tokens if self._target.limits else 0

    @property
    def is_contested(self) -> bool:
        """Several identities have requests that have not ended."""
        return self._pool.queue.contested

    def live(self, request_id: str) -> bool:
        """Whether a request of this id was taken and has not ended."""
        return self._registry.get(request_id) is not None

    def snapshot(self) -> Snapshot:
        """Live figures and counters."""
        return take_snapshot(self._pool, self._target, self._forecast, self._speculator, self._counters)

    def waiting_by_reason(self) -> Mapping[WaitReason, int]:
        """The sequences that wait, by reason; reasons that none has are left out, or 0."""
        return count_reasons(self._pool)

    def shares(self, most: int) -> list[Share]:
        """The shares of the identities that were served most, at most `most`."""
        return largest_shares(self._pool.queue, most)

    def uses_adapter(self, adapter: bytes) -> bool:
        """Whether a live request has this adapter."""
        return any(live.request.adapter == adapter for live in self._registry)

    def adapter_use(self) -> dict[bytes, AdapterUse]:
        """The sequences of live requests with an adapter, by its fingerprint."""
        return count_adapters(self._registry)

    def why(self, request_id: str, now: float) -> WaitReport | None:
        """Where a request is, and why: a live one, or one that has ended and is remembered; else None."""
        self._waits.now = now
        live = self._registry.get(request_id)
        if live is None:
            return self._registry.ended.get(request_id, now)
        return report(live, self._pool, self._target, now)

    @property
    def known_ids(self) -> Iterator[str]:
        """Of the requests that `why` knows, ended ones first."""
        return chain(self._registry.ended, (live.request.id for live in self._registry))

    def courses(self, request_id: str) -> tuple[Course, ...]:
        """Of a live request's sequences. They are kept up to date, and stay as they are when it has ended."""
        live = self._registry.get(request_id)
        return () if live is None else tuple(one.wait.course for one in live.sequences)

    def requests_sent(self) -> set[str]:
        """Ids of the requests that the step that was planned last computes; none if it is answered."""
        steps = list(self._target.in_flight)[-1:]
        sequences = [row.sequence for step in steps for row in step.rows]
        sequences += [opening.sequence for step in steps for opening in step.openings]
        return {one.live.request.id for one in sequences}

    def slow(self, now: float, most: int, identity: str | None = None) -> tuple[list[WaitReport], int]:
        """The requests that have waited longer than expected, oldest first; how many are beyond `most`.

        identity: whose; None: everybody's. Looks at each live request once.
        """
        self._waits.now = now
        found = [live for live in self._registry if identity in (None, live.request.identity)]
        found = [live for live in found if is_slow(live, now)]
        return [report(one, self._pool, self._target, now) for one in found[:most]], max(0, len(found) - most)

    @property
    def log(self) -> StepLog:
        """What the answered steps did."""
        return self._pool.log

    @property
    def fault(self) -> Fault | None:
        """What the queue waits for although it is there; None: nothing, as far as the watchdog can tell."""
        return self._watchdog.fault

    @property
    def identities(self) -> Iterator[str]:
        """The identities that have or had requests, and are remembered."""
        return (account.identity for account in self._pool.queue.accounts)

    def check_integrity(self) -> None:
        """Compare all bookkeeping with itself. Raises AssertionError naming what is wrong."""
        self._registry.check_integrity()
        self._speculator.check_integrity(self._pool.running)
        self._target.check_integrity(self._pool.running)

    # -- requests --------------------------------------------------------------------------------

    def add(self, request: Request, now: float, *, replaces: bool = False) -> list[Event]:
        """Take a request into the queue, also while no executor is connected.

        replaces: a live request of the same id is cancelled, but only if this one is taken.
        Returns the ends of completions that had all their tokens before (`Request.continued`).
        Raises NotReady, IdInUse, NeverFits, NoRoom, QuotaUsed, TooLate.
        """
        self._waits.now = now
        replaced = self._registry.get(request.id) if replaces else None
        with self._limits_for(request.identity) as limits:
            is_trial = self._registry.check(
                request, limits, now, connected=self._target.connected, replaced=replaced
            )
        if replaced is not None:
            self._registry.fail(replaced, Failure.CANCELLED, "replaced", now)
        live = self._registry.add(request, limits, now, is_trial=is_trial)
        self._expiry.added(live, now)
        self._counters.requests += 1
        self._counters.prompt_tokens += request.prompt_tokens
        events = self._registry.take_over(live, now) if request.continued else []
        self._dispatcher.note_no_step()
        return events

    def max_tokens(self, request: Request) -> int:
        """Most output tokens of each completion of a request that was taken."""
        limits = self._target.limits
        return max_tokens(request, limits) if limits else 0

    @property
    def newcomers_wait_s(self) -> float:
        """Predicted seconds until a request starts that comes now, of an identity that has none."""
        limits = self._target.limits
        return self._admission.wait_s("", 1.0, limits.max_sequences if limits else 0)

    def check_room(
        self,
        identity: str,
        now: float,
        prompt_tokens_estimate: int = 0,
        deadline: float | None = None,
        weight: float = 1.0,
    ) -> None:
        """Refuse a request before its prompt is known, as `add` would; a refusal is counted.

        Raises NotReady, NoRoom, QuotaUsed, TooLate. Its cost does not grow with the queue.
        """
        tokens = prompt_tokens_estimate
        with self._limits_for(identity) as limits:
            self._admission.check_room(identity, weight, tokens)
            if self._target.connected:
                self._admission.check_deadline(identity, weight, tokens, deadline, None, limits, now)

    @contextmanager
    def _limits_for(self, identity: str) -> Iterator[JointLimits]:
        """The executors' limits. An AdmissionError from here or from the `with` block counts as a refusal."""
        try:
            if self._target.limits is None:
                raise NotReady("no executor has been seen yet")
            yield self._target.limits
        except AdmissionError:
            self._counters.refused += 1
            if (account := self._pool.queue.account(identity)) is not None:
                account.refused += 1
            raise

    def cancel(self, request_id: str, now: float, message: str = "cancelled") -> Failed | None:
        """Fail a live request; None if it is not live. No later plan contains it."""
        self._waits.now = now
        live = self._registry.get(request_id)
        return None if live is None else self._registry.fail(live, Failure.CANCELLED, message, now)

    def stop(self, request_id: str, index: int, now: float) -> CompletionEnded | None:
        """Finish a completion in which the front end found a stop string; None if it is not live."""
        self._waits.now = now
        live = self._registry.get(request_id)
        if live is None or not 0 <= index < len(live.sequences):
            return None
        sequence = live.sequences[index]
        if sequence.state is SequenceState.ENDED:
            return None
        return self._registry.finish(sequence, EndReason.STOP_STRING, None, now)

    # -- executors -------------------------------------------------------------------------------

    def executor_ready(self, capacity: Capacity, now: float) -> list[Event]:
        """An executor without caches of this scheduler connected. Fails the requests that don't fit it.

        Raises IllegalEvent while another one is connected.
        """
        limits = self._target.ready(capacity, now)
        self._waits.now = now
        self._expiry.executor_ready()
        return self._registry.fit(limits, now)

    def executor_retires(self) -> None:
        """The executor takes no more openings. Sequences with a cache go on; the others wait for another
        executor, for at most `failover_timeout_s`. Does nothing while none is connected.
        """
        self._target.retire()

    def executor_lost(self, now: float) -> list[Event]:
        """The executor is gone with all caches; the steps in flight will never be answered.

        All running sequences are queued again. A sequence that was in flight at two losses, without a new
        token in between, runs alone until it has one; a third loss fails its request. Afterwards `apply` of
        an old step raises UnknownStep. Does nothing while none is connected.
        """
        if not self._target.connected:
            return []
        self._waits.now = now
        self._target.lost()
        self._expiry.executor_lost(now)
        self._forecast.interrupted()
        self._counters.executor_losses += 1
        events = self._registry.lose_executor(now)
        self._dispatcher.note_no_step()
        return events

    # -- the draft executor ----------------------------------------------------------------------

    def draft_ready(self, capacity: Capacity) -> None:
        """A draft executor without caches of this scheduler connected.

        Raises IllegalEvent while another one is connected.
        """
        self._speculator.ready(capacity)

    def draft_lost(self) -> None:
        """The draft executor is gone with its caches; sequences decode without its drafts.

        Afterwards `apply_draft` of an old step raises UnknownStep. Does nothing while none is connected.
        """
        self._speculator.lost()

    def plan_draft(self, now: float) -> PlannedStep | None:
        """The draft executor's next step, which the caller must send; None: nothing to send now.

        At most one is in flight. To be called after every `plan` or right before it, and after
        `apply_draft`. This and `plan` decide which sequences wait for drafts, and get no row meanwhile.
        """
        return self._dispatcher.next_draft_step(now)

    def apply_draft(self, result: StepAnswer, now: float) -> None:
        """Take the draft step's answer; `plan` may have something to send afterwards.

        Raises UnknownStep if it answers no step in flight: the caller should then disconnect that executor.
        """
        self._speculator.apply_draft(result, now)

    # -- time ------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Event]:
        """Fail the requests whose deadline has passed, and those that have waited too long for an executor.

        To be called right before `plan`, with the same `now`.
        """
        self._waits.now = now
        self._expiry.expire(now)
        self._dispatcher.note_no_step()
        return self._expiry.take()

    def next_wakeup(self, now: float) -> float | None:
        """When `expire` or `plan` has something to do by itself, on the caller's clock; None: never."""
        times = (self._expiry.next_at(now), self._dispatcher.next_at(now), self._speculator.next_wakeup(now))
        return min((time for time in times if time is not None), default=None)

    # -- steps -----------------------------------------------------------------------------------

    def plan(self, now: float) -> PlannedStep | None:
        """The next step, which the caller must send; None if there is nothing to send now.

        None also while the allowed number of steps is in flight, or a further one would have only a part of
        the rows of the step after the next answer. Call again after other calls, and at `next_wakeup`.
        """
        self._waits.now = now
        self._expiry.expire(now)
        may_send = self._target.takes_a_step
        step = self._dispatcher.next_step(now)
        if may_send and (step is not None or not self._target.is_kept_busy):  # else nothing was tried
            self._watchdog.planned(now)
        return step

    def apply(self, result: StepAnswer, now: float) -> list[Event]:
        """Take the answer to the oldest step in flight.

        Raises UnknownStep if it answers another step or none: the caller should then disconnect the executor.
        A token that ends a completion is in `Tokens.ids`, counts as a completion token, and is
        `CompletionEnded.matched_id`: front ends leave it out of the text.
        """
        step, began_at, took = self._target.answer(result, now)
        self._waits.now = now
        rows = len(result.rows)
        self._counters.steps += 1
        self._counters.rows += rows
        work = None
        if rows:
            self._forecast.stepped(took, rows)
            deadlines = self._registry.deadlines
            work = self._speculator.stepped(step, result, took, always=deadlines)
            if not (deadlines or self._pool.speculating):
                work = None
        emitted, accepted = self._counters.completion_tokens, self._counters.accepted_tokens
        events, short = self._reader.read(step, result, now)
        if work is not None:
            emitted = self._counters.completion_tokens - emitted
            self._forecast.worked(work, len(step.plan.openings), emitted)
        if Shortage.ROOM in short:
            self._target.was_short(now)
        if Shortage.SLOTS in short:
            self._target.was_short_of_slots(now)
        pool, accepted = self._pool, self._counters.accepted_tokens - accepted
        waiting = len(pool.queue) + pool.held
        pool.log.answered(step.figures, began_at, took, accepted, len(pool.running), waiting)
        earlier = self._expiry.take()
        return earlier + events if earlier else events
