"""The scheduler core's whole surface: what happens goes in, plans and events come out.

    scheduler = Scheduler(CoreConfig())
    scheduler.executor_ready(capacity, now)
    scheduler.add(request, now)
    while True:
        deliver(scheduler.expire(now))           # deadlines, failover timeout
        plan = scheduler.plan(now)               # None: nothing to do until something happens
        if plan: result = executor.step(plan)    # the caller's business
        deliver(scheduler.apply(result, now))

Not thread-safe; one caller. `now` is the caller's clock in seconds and never runs backwards.
Everything here returns at once; a method that raises has changed nothing. Each request ends once:
with a `Finished` for each completion, or with one `Failed`; nothing is emitted for it afterwards.
"""

from __future__ import annotations

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import Event, Failed, Finished
from scheduler_service.core.request import Request
from scheduler_service.core.snapshot import Snapshot
from scheduler_service.core.step import Capacity, Plan, Result


class Scheduler:
    """Decides which sequence computes which tokens in which step."""

    def __init__(self, config: CoreConfig) -> None:
        raise NotImplementedError

    @property
    def capacity(self) -> Capacity | None:
        """The connected (or last connected) executor's; None before the first."""

    @property
    def connected(self) -> bool:
        """An executor is there."""

    @property
    def max_request_tokens(self) -> int:
        """Most tokens (prompt + max_tokens) that a request may have; 0 before the first executor."""

    def add(self, request: Request, now: float) -> None:
        """Take a request into the queue, also while no executor is connected.

        Raises NotReady, DuplicateRequest, NeverFits, QueueFull.
        """

    def cancel(self, request_id: str, now: float, message: str = "cancelled") -> Failed | None:
        """End a request; None if it is not live. No later plan has it."""

    def stop(self, request_id: str, index: int, now: float) -> Finished | None:
        """End a completion well: the front end found a stop string. None if it is not live."""

    def executor_ready(self, capacity: Capacity, now: float) -> list[Event]:
        """An executor with no cache of ours is there. Fails the requests that don't fit it."""

    def executor_lost(self, now: float) -> list[Event]:
        """The executor and all caches are gone; steps in flight will never be answered.

        All sequences go back to the queue. Afterwards `apply` of an old step raises UnknownStep.
        """

    def expire(self, now: float) -> list[Event]:
        """Fail what has reached its deadline or waited too long for an executor.

        Call it right before `plan`, with the same `now`.
        """

    def next_wakeup(self, now: float) -> float | None:
        """When `expire` next has something to do, on the caller's clock; None: never."""

    def plan(self, now: float) -> Plan | None:
        """The next step, which the caller must send; None if there is nothing to send now.

        After None, ask again when anything has happened. With `max_in_flight` steps
        unanswered it is None.
        """

    def apply(self, result: Result, now: float) -> list[Event]:
        """Take a step's answer; steps are answered in order. Raises UnknownStep.

        A token that ends a completion (eos or a stop token) is in `Tokens.ids`, counts as a
        completion token, and is `Finished.matched_id`: front ends leave it out of the text.
        """

    def live(self, request_id: str) -> bool:
        """The request was taken and has not ended."""

    def snapshot(self) -> Snapshot:
        """Live figures and counters."""

    def check_integrity(self) -> None:
        """Compare all bookkeeping with itself. Raises AssertionError naming what is wrong."""
