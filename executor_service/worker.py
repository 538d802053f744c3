"""The one thread that owns the device: jobs in, results out, in order.

The event loop submits and awaits; it never waits for the device. Between two jobs the worker reads
whatever else is queued (which renews leases), then lets leases expire. A job that raises anything but
a refusal leaves the device or the books in an unknown state, so it ends the process: a client loses
nothing that it can't compute again, and wrong tokens would be worse.
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

from executor_service.engine import Engine
from executor_service.fatal import die
from executor_service.plan import Reason, StepRefused

log = Log(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    future: asyncio.Future[Any]
    session_id: int


class Worker:
    """Runs jobs one after another on a thread of its own; `submit` is for the event loop's thread."""

    def __init__(self, max_queued: int = 1024, tick_s: float = 0.25, check_s: float = 1.0) -> None:
        self._max_queued, self._tick_s, self._check_s = max_queued, tick_s, check_s
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: deque[_Job] = deque()
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checked_steps, self._next_check_s = 0, 0.0
        self._busy_since: float | None = None
        self._answers: queue.SimpleQueue[tuple[asyncio.Future[Any], Any, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._answering = threading.Thread(target=self._answer, name="answers", daemon=True)

    @property
    def queued(self) -> int:
        """Jobs waiting, the running one excluded."""
        return self._inbox.qsize() + len(self._pending)

    @property
    def busy_s(self) -> float:
        """For how long the running job has been running; 0 when idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self, load: Callable[[], Engine]) -> asyncio.Future[Engine]:
        """Start the thread with its first job, loading the model; the future is that job's."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._answering.start()

        def run() -> Engine:
            self._engine = load()
            return self._engine

        return self.submit(run)

    def submit(self, work: Callable[[], T], session_id: int = 0) -> asyncio.Future[T]:
        """Queue a job; jobs run in the order of these calls. Raises StepRefused when too many wait.

        Cancelling the future does not cancel the job: a step that was accepted is done.
        """
        assert self._loop is not None
        if self.queued >= self._max_queued:
            raise StepRefused(Reason.RESOURCE_EXHAUSTED, f"{self._max_queued} steps are queued; wait")
        future: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put(_Job(work, future, session_id))
        return future

    def stop(self, timeout_s: float) -> bool:
        """Finish what is queued and end the thread; False if that took too long."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        self._answers.put(None)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            die(error)

    def _turn(self) -> bool:
        """Read what is queued, expire, do one job; False when told to stop and nothing is left."""
        stopping = not self._read(wait=not self._pending)
        if self._engine is not None and (expired := self._engine.expire()):
            log.warning("leases ran out", released_sequences=expired)
        if self._pending:
            self._do(self._pending.popleft())
        elif self._engine is not None:
            self._check(self._engine)
        if stopping:
            self._inbox.put(None)  # for the next turn
        return bool(self._pending) or not stopping

    def _read(self, *, wait: bool) -> bool:
        """Move the inbox to `_pending`, renewing the leases of all who asked; False at the stop mark."""
        try:
            job = self._inbox.get(timeout=self._tick_s) if wait else self._inbox.get_nowait()
            while job is not None:
                if self._engine is not None and job.session_id:
                    self._engine.touch(job.session_id)
                self._pending.append(job)
                job = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _do(self, job: _Job) -> None:
        assert self._loop is not None
        self._busy_since = time.monotonic()
        try:
            outcome: Any = job.work()
            failed = False
        except StepRefused as refused:
            outcome, failed = refused, True
        self._busy_since = None
        if self.queued:
            self._answers.put((job.future, outcome, failed))
        else:
            self._loop.call_soon_threadsafe(_settle, job.future, outcome, failed)

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
        steps, began = engine.counters.steps, time.monotonic()
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
