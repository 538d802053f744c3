"""Requests that end because time has passed: their deadline, or the wait for an executor."""

from __future__ import annotations

from scheduler_service.core.events import Event, Failure
from scheduler_service.core.registry import Registry
from scheduler_service.core.sequence import LiveRequest, LiveSequence
from scheduler_service.core.target_executor import TargetExecutor
from scheduler_service.core.unplaced import StrandedRequests


class Expiry:
    """Fails requests whose time is over, and keeps these events until they are taken."""

    def __init__(self, failover_timeout_s: float, registry: Registry, target: TargetExecutor) -> None:
        """failover_timeout_s: how long a request waits while no executor opens caches."""
        self._failover_timeout_s = failover_timeout_s
        self._registry = registry
        self._target = target
        self._stranded = StrandedRequests(failover_timeout_s)
        self._events: list[Event] = []

    def added(self, live: LiveRequest, now: float) -> None:
        """A request was taken: its wait begins if no executor opens caches."""
        if not self._target.opens_caches:
            self._stranded.strand(live, now)

    def executor_ready(self) -> None:
        """An executor opens caches: no request waits for one."""
        self._stranded.relieve()

    def executor_lost(self, now: float) -> None:
        """No executor is there: the wait of all requests begins."""
        for live in self._registry:
            self._stranded.strand(live, now)

    def expire(self, now: float) -> None:
        """Fail the requests whose deadline has passed, and those that have waited too long."""
        for live in self._registry.past_deadline(now):
            self._events.append(self._registry.fail(live, Failure.DEADLINE, "its deadline has passed", now))
        if self._target.retiring:
            for live in self._registry:
                if not any(sequence.cache_id for sequence in live.sequences):
                    self._stranded.strand(live, now)  # queued, or preempted meanwhile
        for live in self._stranded.overdue(now):
            message = f"no executor for {self._failover_timeout_s:g} s"
            self._events.append(self._registry.fail(live, Failure.NO_EXECUTOR, message, now))

    def give_up(self, late: LiveSequence, now: float) -> None:
        """Fail the request of a sequence that is next to start and can't meet its deadline any more."""
        message = "it could not have been done by its deadline"
        self._events.append(self._registry.fail(late.live, Failure.DEADLINE, message, now))

    def take(self) -> list[Event]:
        """The events since the last call."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def next_at(self, now: float) -> float | None:
        """When `expire` or `take` has something to do, on the caller's clock; None: never."""
        times = [now] if self._events else []
        if (deadline := self._registry.next_deadline()) is not None:
            times.append(deadline)
        if not self._target.opens_caches and (ends := self._stranded.ends()) is not None:
            times.append(ends)
        return min(times, default=None)
