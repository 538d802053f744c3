"""The jobs of one lane: bounded in number and bytes, and started in turn among callers."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from scheduler_service.text.errors import BusyError
from scheduler_service.text.job import TextJob


class LaneQueue:
    """Queued and running jobs. `next` goes round the callers, and takes each caller's jobs in their order.

    The totals of all callers are limited to `max_jobs` and `max_bytes`. Each of n callers with jobs may have
    1/(n+1) of both limits, so that there is always room for one more caller; a single caller has half.
    """

    def __init__(self, max_jobs: int, max_bytes: int) -> None:
        self._max_jobs, self._max_bytes = max_jobs, max_bytes
        self._queued: OrderedDict[str, deque[TextJob]] = OrderedDict()  # by caller; the next caller is first
        self._jobs: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._queued)

    def enter(self, job: TextJob) -> None:
        """Append a job to its caller's queue. Raises BusyError if a limit would be exceeded."""
        caller, size = job.caller, len(job.payload)
        jobs, filled = self._jobs.total() + 1, self._bytes.total() + size
        sharers = len(self._jobs.keys() | {caller}) + 1
        if jobs > self._max_jobs or filled > self._max_bytes:
            raise BusyError("too much text waits for the tokenizer")
        own_jobs, own_bytes = self._jobs[caller] + 1, self._bytes[caller] + size
        if own_jobs > self._max_jobs // sharers or own_bytes > self._max_bytes // sharers:
            raise BusyError("too much text of this caller waits for the tokenizer")
        self._jobs[caller], self._bytes[caller] = own_jobs, own_bytes
        self._queued.setdefault(caller, deque()).append(job)

    def leave(self, job: TextJob) -> None:
        """Forget a job that has ended or was cancelled, queued or running."""
        caller = job.caller
        self._jobs[caller] -= 1
        self._bytes[caller] -= len(job.payload)
        if not self._jobs[caller]:
            del self._jobs[caller], self._bytes[caller]
        queued = self._queued.get(caller, ())
        if job in queued:
            self._remove(caller, job)

    def put_back(self, job: TextJob) -> None:
        """Queue a running job again, before all others: its process has ended."""
        self._queued.setdefault(job.caller, deque()).appendleft(job)
        self._queued.move_to_end(job.caller, last=False)

    def next(self) -> TextJob:
        """Take the job to be run next. Raises KeyError if none is queued."""
        caller = next(iter(self._queued), "")
        job = self._queued[caller][0]
        self._remove(caller, job)
        if caller in self._queued:
            self._queued.move_to_end(caller)
        return job

    def _remove(self, caller: str, job: TextJob) -> None:
        jobs = self._queued[caller]
        jobs.remove(job)
        if not jobs:
            del self._queued[caller]
