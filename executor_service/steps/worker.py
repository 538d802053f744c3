"""The one thread that owns the device: jobs in, results out, in order.

The event loop submits and awaits; it never waits for the device. Between two jobs the worker reads
whatever else is queued, renews the leases of all who wait, then lets leases expire. A job whose future was
cancelled is forgotten in its turn, and one that is running finds out by asking (`wanted`); a job that is
`kept` is done all the same, and so is a step whose replay is queued by somebody else. A job that raises
anything but a refusal leaves the device or the books in an unknown state, so it ends the process: a client
loses nothing that it can't compute again, and wrong tokens would be worse.

A step that was begun may be under way on the device. The next one is begun behind it as soon as it comes:
the worker waits for that and for the device at once, with the help of a thread that waits for the device
alone. All other jobs find nothing under way.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.service.logs import Log

from executor_service.backends.base import Flight
from executor_service.contract.plan import Abandoned, Reason, StepPlan, StepRefused, StepResult
from executor_service.fatal import die
from executor_service.steps.engine import MOST_FLIGHTS, Engine, Step

log = Log(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    future: asyncio.Future[Any]
    session_id: int
    kept: bool  # done all the same when the future is cancelled
    is_step: bool = False
    replay: bytes = b""  # what a replay of the step has in common with it; empty: it has none

    @property
    def alive(self) -> bool:
        """Whether it is to be done for its own sake."""
        return self.kept or not self.future.cancelled()


@dataclass(frozen=True, slots=True)
class _Begun:
    step: Step
    future: asyncio.Future[tuple[StepPlan, StepResult]]


class Worker:
    """Runs jobs one after another on a thread of its own; `submit` is for the event loop's thread."""

    def __init__(self, max_queued: int = 1024, tick_s: float = 0.25, check_s: float = 1.0) -> None:
        self._max_queued, self._tick_s, self._check_s = max_queued, tick_s, check_s
        self._inbox: queue.SimpleQueue[_Job | Step | None] = queue.SimpleQueue()  # a step: it has landed
        self._pending: deque[_Job] = deque()
        self._running: _Job | None = None
        self._begun: deque[_Begun] = deque()
        self._watched: Step | None = None  # the oldest of them, where the inbox will be told that it landed
        self._landed = False  # it was told
        self._submitted = self._taken = 0  # jobs; each is counted by one thread
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checked_steps, self._next_check_s = 0, 0.0
        self._busy_since: float | None = None
        self._answers: queue.SimpleQueue[tuple[asyncio.Future[Any], Any, bool] | None] = queue.SimpleQueue()
        self._flights: queue.SimpleQueue[tuple[Step, Flight] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._waiting = threading.Thread(target=self._wait, name="flights", daemon=True)
        self._answering = threading.Thread(target=self._answer, name="answers", daemon=True)

    @property
    def queued(self) -> int:
        """Jobs waiting, the running one excluded."""
        return self._submitted - self._taken

    @property
    def busy_s(self) -> float:
        """For how long the running job, or the oldest step under way, has been running; 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self, load: Callable[[], Engine]) -> asyncio.Future[Engine]:
        """Start the thread with its first job, loading the model; the future is that job's."""
        self._loop = asyncio.get_running_loop()
        for thread in (self._thread, self._waiting, self._answering):
            thread.start()

        def run() -> Engine:
            self._engine = load()
            return self._engine

        return self.submit(run, kept=True)

    def submit(self, work: Callable[[], T], session_id: int = 0, *, kept: bool = False) -> asyncio.Future[T]:
        """Queue a job; jobs run in the order of these calls. Raises StepRefused when too many wait.

        Cancelling the future cancels the job, unless that is to be kept.
        """
        future = self._new_future()
        self._put(_Job(work, future, session_id, kept))
        return future

    def submit_step(
        self, begin: Callable[[], Step], plan: StepPlan, *, kept: bool
    ) -> asyncio.Future[tuple[StepPlan, StepResult]]:
        """The same for a job that begins the step of a plan; the future is the step's."""
        future = self._new_future()
        replay = plan.digest if plan.step_id else b""
        self._put(_Job(begin, future, plan.session_id, kept, True, replay))
        return future

    def wanted(self) -> bool:
        """Whether anybody waits for the running job; device thread, between two forwards.

        Answers what is done meanwhile, and lets go of what was queued and then cancelled.
        """
        self._answer_done()
        if not self._read_queued():
            self._inbox.put(None)  # for the next turn
        self._forget_cancelled()
        return self._running is None or self._wants(self._running)

    def _new_future(self) -> asyncio.Future[Any]:
        assert self._loop is not None
        if self.queued >= self._max_queued:
            raise StepRefused(Reason.QUEUE, f"{self._max_queued} steps are queued; wait")
        return self._loop.create_future()

    def _put(self, job: _Job) -> None:
        self._submitted += 1
        self._inbox.put(job)

    def stop(self, timeout_s: float) -> bool:
        """Finish what is queued and end the thread; False if that took too long."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        self._answers.put(None)
        self._flights.put(None)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            die(error)

    def _turn(self) -> bool:
        """Read what has come, expire, do one thing; False when told to stop and nothing is left."""
        stopping = not self._read()
        if self._engine is not None:
            self._expire(self._engine)
        self._answer_done()
        begun = len(self._begun)
        if self._pending and (not begun or (self._pending[0].is_step and begun < MOST_FLIGHTS)):
            self._do(self._pending.popleft())
        elif begun and (self._landed or self._pending or begun == MOST_FLIGHTS or stopping):
            self._begun[0].step.finish()
            self._answer_done()
        elif begun:
            self._watch(self._begun[0].step)  # and then wait for whatever comes first
        elif self._engine is not None:
            self._check(self._engine)
        if stopping:
            self._inbox.put(None)  # for the next turn
        return bool(self._pending or self._begun) or not stopping

    def _read(self) -> bool:
        """Move the inbox to `_pending`; False at the stop mark.

        Waits when there is nothing else to do.
        """
        waiting = not self._begun or (self._watched is self._begun[0].step and not self._landed)
        idle = not self._pending and waiting
        return self._read_queued(self._tick_s if idle else 0.0)

    def _read_queued(self, timeout_s: float = 0.0) -> bool:
        """The same, without waiting but for the first item."""
        try:
            item = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while item is not None:
                if isinstance(item, Step):
                    self._landed = self._landed or item is self._watched
                else:
                    self._pending.append(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _wants(self, job: _Job) -> bool:
        """Whether the job is to be done, be it for the sake of a replay that is queued."""
        if job.alive or not job.replay:
            return job.alive
        return any(other.alive and other.replay == job.replay for other in self._pending)

    def _forget_cancelled(self) -> None:
        """Let go of jobs that are queued and that nobody waits for any more: others may queue."""
        if all(job.alive for job in self._pending):
            return
        replays = {job.replay for job in self._pending if job.replay and job.alive}
        pending, self._pending = self._pending, deque()
        for job in pending:
            if job.alive or job.replay in replays:
                self._pending.append(job)
            else:
                self._forget(job)

    def _forget(self, job: _Job) -> None:
        self._taken += 1
        if job.is_step and self._engine is not None:
            self._engine.counters.steps_abandoned += 1

    def _expire(self, engine: Engine) -> None:
        """Let leases run out, but for those of who waits."""
        for session_id in {job.session_id for job in self._pending}:
            engine.touch(session_id)
        if expired := engine.expire():
            log.warning("leases ran out", released_sequences=expired)

    def _do(self, job: _Job) -> None:
        if not self._wants(job):
            self._forget(job)
            return
        self._taken += 1
        self._running = job
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        try:
            outcome: Any = job.work()
            failed = False
        except (StepRefused, Abandoned) as error:
            outcome, failed = error, True
        self._running = None
        if job.is_step and not failed:
            self._begun.append(_Begun(outcome, job.future))
            self._answer_done()
            return
        if not self._begun:
            self._busy_since = None
        self._post(job.future, outcome, failed)

    def _answer_done(self) -> None:
        """Answer the steps that are done; some are because another one had to find them so."""
        while self._begun and (result := self._begun[0].step.result) is not None:
            done = self._begun.popleft()
            self._landed, self._watched = False, None
            busy = self._begun or self._running  # now that one has the device
            self._busy_since = time.monotonic() if busy else None
            self._post(done.future, (done.step.plan, result), failed=False)

    def _post(self, future: asyncio.Future[Any], outcome: Any, failed: bool) -> None:
        assert self._loop is not None
        if self.queued or self._begun:
            self._answers.put((future, outcome, failed))
        else:
            self._loop.call_soon_threadsafe(_settle, future, outcome, failed)

    def _watch(self, step: Step) -> None:
        """Have the inbox told when the step has landed."""
        if step is not self._watched and step.flight is not None:
            self._watched = step
            self._flights.put((step, step.flight))

    def _wait(self) -> None:
        """Wait for the device, so that the device thread can wait for what comes meanwhile."""
        try:
            while (watched := self._flights.get()) is not None:
                step, flight = watched
                flight.wait()
                self._inbox.put(step)
        except BaseException as error:
            die(error)

    def _answer(self) -> None:
        """Settle what was done while more is queued.

        Waking the event loop is a system call, in which the device thread would lose the interpreter to it
        with the next job at hand; here that waits until the device thread computes without the interpreter.
        """
        assert self._loop is not None
        while (answer := self._answers.get()) is not None:
            self._loop.call_soon_threadsafe(_settle, *answer)

    def _check(self, engine: Engine) -> None:
        """Balance the books while idle if anything was done; never more than 1 % of the time."""
        counters, began = engine.counters, time.monotonic()
        steps = counters.steps + counters.steps_abandoned
        if steps != self._checked_steps and began >= self._next_check_s:
            engine.check()
            self._checked_steps = steps
            now = time.monotonic()
            self._next_check_s = now + max(self._check_s, 100 * (now - began))


def _settle(future: asyncio.Future[Any], outcome: Any, failed: bool) -> None:
    if future.done():  # the client left
        return
    if failed:
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
