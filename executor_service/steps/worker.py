"""`DeviceWorker`: the thread that owns the device. Jobs in, results out, in order.

The event loop submits and awaits; it never waits for the device. Each turn of the thread reads what was
queued, renews the leases of all sessions that have jobs queued, lets leases expire, and does one thing: begin
the next step, run another job, or finish the oldest step in flight. With one step in flight it waits for the
next job or the device, whichever comes first. Where there is nothing to do it computes masks that the next
steps are likely to need, and goes on with replays of outputs that these are likely to bring again. Jobs that
are not steps run with nothing in flight.

A job whose future was cancelled is dropped when its turn comes. A job of several forwards is suspended before
each of them: the thread sends the answers that are ready, reads what was queued, and resumes the job with
whether a client still waits for it. A job that is `kept` is done regardless, and so is a step whose replay is
queued.

A job that raises anything but a refusal leaves the device or the page tables in an unknown state and ends the
process: clients lose nothing that they cannot compute again, and wrong tokens would be worse.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from types import GeneratorType
from typing import Any, TypeVar

from service_kit.logs import Log

from executor_service.contract.plan import Abandoned, Forwards, Reason, RequestRefused, StepPlan, StepResult
from executor_service.fatal import die
from executor_service.steps.answers import AnswerSender
from executor_service.steps.engine import Engine
from executor_service.steps.forward_watcher import ForwardWatcher
from executor_service.steps.job_queue import DeviceJob, JobQueue
from executor_service.steps.step_in_flight import StepRequest

log = Log(__name__)

T = TypeVar("T")

# Between two parts of a replay: they keep the interpreter from the event loop.
_PAUSE, _MIN_PAUSE_S = 4, 0.0005  # times what the part took; seconds at least


class DeviceWorker:
    """Runs jobs on a thread of its own. `submit` and `submit_step`: the event loop's thread."""

    def __init__(self, max_queued: int = 1024, tick_s: float = 0.25, check_s: float = 1.0) -> None:
        self._max_queued, self._tick_s, self._check_s = max_queued, tick_s, check_s
        self._jobs = JobQueue()
        self._answers = AnswerSender()
        self._watcher = ForwardWatcher(on_done=self._jobs.wake)
        self._is_running = False  # a job is running, or suspended between two forwards
        self._busy_since_s: float | None = None
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checked_steps, self._next_check_s = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    @property
    def queued(self) -> int:
        """Number of queued jobs, without the running one. Any thread."""
        return self._jobs.queued

    @property
    def busy_s(self) -> float:
        """Seconds for which the running job or the oldest step in flight has had the device; 0: idle.

        Any thread.
        """
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def start(self, load: Callable[[], Engine]) -> asyncio.Future[Engine]:
        """Start the thread; its first job loads the model, and the future is that job's."""
        self._loop = asyncio.get_running_loop()
        self._answers.start(self._loop)
        self._watcher.start()
        self._thread.start()

        def run() -> Engine:
            self._engine = load()
            return self._engine

        return self.submit(run, kept=True)

    def stop(self, timeout_s: float) -> bool:
        """Finish the queued jobs and end the thread. False: it did not end within the time limit."""
        self._jobs.close()
        self._thread.join(timeout_s)
        self._answers.stop()
        self._watcher.stop()
        return not self._thread.is_alive()

    def submit(self, work: Callable[[], T], session_id: int = 0, *, kept: bool = False) -> asyncio.Future[T]:
        """Queue a job; jobs run in the order of these calls. Raises RequestRefused when too many are queued.

        Cancelling the future cancels the job, unless it is `kept` or has begun.
        """
        future = self._new_future()
        self._jobs.put(DeviceJob(work, future, session_id, kept))
        return future

    def submit_forwards(self, work: Callable[[], Forwards[T]]) -> asyncio.Future[T]:
        """The same for a job of several forwards; one that has begun is cancelled before its next forward."""
        future = self._new_future()
        self._jobs.put(DeviceJob(work, future, session_id=0, kept=False))
        return future

    def submit_step(
        self, plan: StepPlan, caller: str = "", *, kept: bool
    ) -> asyncio.Future[tuple[StepPlan, StepResult]]:
        """The same for a step. If it is not `kept`, it can be abandoned between two of its forwards."""
        future = self._new_future()
        request = StepRequest(plan, future, time.perf_counter(), caller, abandonable=not kept)
        replay_key = plan.digest if plan.step_id else b""
        begin = partial(self._begin, request)
        self._jobs.put(DeviceJob(begin, future, plan.session_id, kept, is_step=True, replay_key=replay_key))
        return future

    def _new_future(self) -> asyncio.Future[Any]:
        assert self._loop is not None
        if self.queued >= self._max_queued:
            raise RequestRefused(Reason.QUEUE, f"{self._max_queued} steps are queued; wait")
        return self._loop.create_future()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            die(error)

    def _turn(self) -> bool:
        """Read the queue, expire leases, do one thing. False: closed, and nothing is left to do."""
        self._jobs.read(0.0 if self._has_work() else self._tick_s)
        job, engine = self._jobs.first, self._engine
        if engine is None:  # not loaded yet
            if job is not None:
                self._do(self._jobs.take())
            return job is not None or not self._jobs.is_closed
        self._expire(engine)
        pipeline, forward = engine.pipeline, engine.pipeline.oldest_forward
        if job is not None and (forward is None or (job.is_step and not pipeline.is_full)):
            self._do(self._jobs.take())
        elif forward is None and not (pipeline.has_unprepared or pipeline.has_replays):
            self._check(engine)
        elif forward is None:
            self._prepare(engine)
        elif job is not None or pipeline.is_full or self._jobs.is_closed or self._watcher.is_done(forward):
            pipeline.finish_oldest()
            self._send_answers()
        else:
            self._watcher.watch(forward)
            self._prepare(engine)
        return self._jobs.first is not None or len(pipeline) > 0 or not self._jobs.is_closed

    def _has_work(self) -> bool:
        """Whether there is something to do without waiting for a new job or the device."""
        if self._jobs.first is not None or self._jobs.is_closed:
            return True
        if self._engine is None:
            return False
        pipeline = self._engine.pipeline
        forward = pipeline.oldest_forward
        if pipeline.has_unprepared or pipeline.has_replays:
            return True
        return forward is not None and not self._watcher.is_waiting_for(forward)

    def _prepare(self, engine: Engine) -> None:
        """Prepare the next steps until another thread has put a job, or the device is done."""
        pipeline = engine.pipeline
        while pipeline.has_unprepared and not self._jobs.has_news:
            pipeline.prepare_next_mask()
        if pipeline.has_replays and not self._jobs.has_news:
            spent_s = pipeline.go_on_replaying()
            self._jobs.read(max(_MIN_PAUSE_S, _PAUSE * spent_s))

    def _expire(self, engine: Engine) -> None:
        """Release what has outlived its lease; sessions with queued jobs are renewed first."""
        for session_id in self._jobs.session_ids:
            engine.store.sessions.touch(session_id)
        if expired := engine.expire():
            log.warning("leases ran out", released_sequences=expired)

    def _do(self, job: DeviceJob) -> None:
        if not self._jobs.is_wanted(job):
            self._count_dropped(job)
            return
        self._is_running = True
        if self._busy_since_s is None:
            self._busy_since_s = time.monotonic()
        try:
            outcome = job.work()
            if isinstance(outcome, GeneratorType):
                outcome = self._run_forwards(job, outcome)
            if not job.is_step:
                self._answers.add(job.future, outcome)
        except (RequestRefused, Abandoned) as error:
            self._answers.add(job.future, error, is_error=True)
        self._is_running = False
        self._send_answers()

    def _run_forwards(self, job: DeviceJob, forwards: Forwards[Any]) -> Any:
        """Run a job of several forwards; before each, answer finished steps and read the queue."""
        try:
            next(forwards)
            while True:
                self._send_answers()
                self._jobs.read()
                for dropped in self._jobs.drop_cancelled():
                    self._count_dropped(dropped)
                forwards.send(self._jobs.is_wanted(job))
        except StopIteration as end:
            return end.value

    def _begin(self, request: StepRequest) -> Forwards[None]:
        assert self._engine is not None
        return self._engine.pipeline.begin(request)

    def _send_answers(self) -> None:
        """Send what the running job and the pipeline have finished."""
        in_flight = 0
        if self._engine is not None:
            pipeline = self._engine.pipeline
            in_flight = len(pipeline)
            for request, result in pipeline.take_finished():
                self._answers.add(request.reply_to, (request.plan, result))
                self._busy_since_s = time.monotonic()  # when the next step got the device
        if not (self._is_running or in_flight):
            self._busy_since_s = None
        self._answers.send(at_once=not (self.queued or in_flight))

    def _count_dropped(self, job: DeviceJob) -> None:
        if job.is_step and self._engine is not None:
            self._engine.counters.steps_abandoned += 1

    def _check(self, engine: Engine) -> None:
        """Check the page tables if steps were done since the last check; at most 1 % of the time."""
        counters, began_s = engine.counters, time.monotonic()
        steps = counters.steps + counters.steps_abandoned
        if steps != self._checked_steps and began_s >= self._next_check_s:
            engine.store.check()
            self._checked_steps = steps
            now_s = time.monotonic()
            self._next_check_s = now_s + max(self._check_s, 100 * (now_s - began_s))
