"""The jobs of one lane: bounded, shared among callers, and begun in turn."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from scheduler_service.text.errors import BusyError
from scheduler_service.text.process import Job


class Lane:
    """Jobs that wait or run, of each caller in their order, the callers in turn.

    All together are at most `max_jobs` and `max_bytes`. One caller may have as much as it leaves to each
    of the others there and to one newcomer: half of it while it is alone.
    """

    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        self._max_jobs, self._max_bytes = max_jobs, max_bytes
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by caller; who is next stands first
        self._jobs: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def enter(self, job: Job) -> None:
        """Count it, and let it wait. Raises BusyError."""
        caller, size = job.caller, len(job.payload)
        jobs, filled = self._jobs.total() + 1, self._bytes.total() + size
        sharers = len(self._jobs.keys() | {caller}) + 1
        if jobs > self._max_jobs or filled > self._max_bytes:
            raise BusyError("too much text waits for the tokenizer")
        own_jobs, own_bytes = self._jobs[caller] + 1, self._bytes[caller] + size
        if own_jobs > self._max_jobs // sharers or own_bytes > self._max_bytes // sharers:
            raise BusyError("too much text of this caller waits for the tokenizer")
        self._jobs[caller], self._bytes[caller] = own_jobs, own_bytes
        self._waiting.setdefault(caller, deque()).append(job)

    def leave(self, job: Job) -> None:
        """It has ended, whether it was begun or not."""
        caller = job.caller
        self._jobs[caller] -= 1
        self._bytes[caller] -= len(job.payload)
        if not self._jobs[caller]:
            del self._jobs[caller], self._bytes[caller]
        waiting = self._waiting.get(caller, ())
        if job in waiting:
            self._remove(caller, job)

    def put_back(self, job: Job) -> None:
        """It was begun and has to begin again, before all others."""
        self._waiting.setdefault(job.caller, deque()).appendleft(job)
        self._waiting.move_to_end(job.caller, last=False)

    def next(self) -> Job:
        """The job to begin now. Raises KeyError if none waits."""
        caller = next(iter(self._waiting), "")
        job = self._waiting[caller][0]
        self._remove(caller, job)
        if caller in self._waiting:
            self._waiting.move_to_end(caller)
        return job

    def _remove(self, caller: str, job: Job) -> None:
        jobs = self._waiting[caller]
        jobs.remove(job)
        if not jobs:
            del self._waiting[caller]
