"""Clients that leave: caught by test_leaving.py."""

from __future__ import annotations

from typing import Any

from executor_service.cache.sequence_store import SequenceStore
from executor_service.contract.plan import Abandoned, Reason, RequestRefused
from executor_service.steps.job_queue import JobQueue
from executor_service.steps.pipeline import Pipeline
from executor_service.steps.savepoint import Savepoint
from executor_service.steps.step_rows import StepRows
from executor_service.steps.worker import DeviceWorker
from tests.conformance.kit.target import SLOW
from tests.conformance.mutants.registry import mutant, wrap


@mutant(SLOW)
def cancelled_step_half_undone() -> None:
    """a step given up in the middle takes back its rows and leaves its ops applied"""
    Savepoint.restore = Savepoint.discard  # type: ignore[method-assign]


@mutant(SLOW)
def cancelled_opening_stays() -> None:
    """a step given up in the middle leaves the caches that it opened, without their tokens"""
    StepRows.undo = lambda self, store: None  # type: ignore[method-assign]


@mutant(SLOW)
def cancelled_opening_keeps_its_slot() -> None:
    """a step given up in the middle goes on holding the adapters of what it opened"""

    def take_back(original: Any, self: SequenceStore, session: Any, cache_id: int) -> None:
        self.adapters.share(session.caches[cache_id].adapter)
        original(self, session, cache_id)

    wrap(SequenceStore, "take_back", take_back)


@mutant(SLOW)
def cancelled_step_uses_its_id_up() -> None:
    """a step given up in the middle counts as done, but there is no reply of it"""

    def begin(original: Any, self: Pipeline, request: Any) -> Any:
        try:
            yield from original(self, request)
        except Abandoned:
            self._store.sessions.get(request.plan.session_id, request.caller).advance(request.plan)
            raise

    wrap(Pipeline, "begin", begin)


@mutant(SLOW)
def replays_leave_with_the_first() -> None:
    """a step whose first client left is given up although another waits for it"""
    given_up: set[bytes] = set()

    def is_wanted(original: Any, self: JobQueue, job: Any) -> bool:
        if original(self, job) and not job.is_wanted:
            given_up.add(job.replay_key)
        return bool(job.is_wanted)

    def begin(original: Any, self: Pipeline, request: Any) -> Any:
        if request.plan.digest in given_up:
            raise RequestRefused(Reason.STEP_FORGOTTEN, "the step was given up")
        yield from original(self, request)

    wrap(JobQueue, "is_wanted", is_wanted)
    wrap(Pipeline, "begin", begin)


@mutant(SLOW)
def closed_stream_cancels() -> None:
    """closing a stream gives up the step that it sent"""
    wrap(DeviceWorker, "submit_step", lambda original, self, *args, kept: original(self, *args, kept=False))
