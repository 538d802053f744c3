"""`JobQueue`: calls that the event loop's thread queues for the device thread."""

from __future__ import annotations

import asyncio
import enum
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceJob:
    """One call on the device thread, and the future for its result."""

    work: Callable[[], Any]
    future: asyncio.Future[Any]
    session_id: int
    kept: bool  # done even if the future is cancelled
    is_step: bool = False
    replay_key: bytes = b""  # equal for a step and its replays; empty: it cannot be replayed

    @property
    def is_wanted(self) -> bool:
        """Whether the job is kept, or its future is not cancelled. A replay may want it all the same."""
        return self.kept or not self.future.cancelled()


class _Mark(enum.Enum):
    WAKE = enum.auto()
    CLOSE = enum.auto()


class JobQueue:
    """Jobs in the order of `put`. Another thread puts, wakes and closes; the rest is the device thread's."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[DeviceJob | _Mark] = queue.SimpleQueue()
        self._jobs: deque[DeviceJob] = deque()
        self._put = self._taken = 0  # each written by one thread
        self.is_closed = False

    @property
    def queued(self) -> int:
        """Number of jobs put and not taken. Any thread."""
        return self._put - self._taken

    @property
    def has_news(self) -> bool:
        """Whether a `read` would read something."""
        return not self._inbox.empty()

    @property
    def first(self) -> DeviceJob | None:
        """The next job of those that were read; None: there is none."""
        return self._jobs[0] if self._jobs else None

    @property
    def session_ids(self) -> set[int]:
        """The sessions of the jobs that were read."""
        return {job.session_id for job in self._jobs}

    def put(self, job: DeviceJob) -> None:
        """Add a job at the end."""
        self._put += 1
        self._inbox.put(job)

    def wake(self) -> None:
        """End a `read` that waits. Any thread."""
        self._inbox.put(_Mark.WAKE)

    def close(self) -> None:
        """Say that no more jobs are coming."""
        self._inbox.put(_Mark.CLOSE)

    def read(self, timeout_s: float = 0.0) -> None:
        """Read what other threads put; wait up to `timeout_s` seconds for a job, `wake` or `close`."""
        try:
            item = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while True:
                if isinstance(item, DeviceJob):
                    self._jobs.append(item)
                elif item is _Mark.CLOSE:
                    self.is_closed = True
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def take(self) -> DeviceJob:
        """Remove the first job."""
        self._taken += 1
        return self._jobs.popleft()

    def is_wanted(self, job: DeviceJob) -> bool:
        """Whether the job, or a queued replay of its step, is kept or not cancelled."""
        if job.is_wanted or not job.replay_key:
            return job.is_wanted
        return any(other.is_wanted and other.replay_key == job.replay_key for other in self._jobs)

    def drop_cancelled(self) -> list[DeviceJob]:
        """Remove the jobs that are not wanted, so that others can be queued; returns them."""
        if all(job.is_wanted for job in self._jobs):
            return []
        replays = {job.replay_key for job in self._jobs if job.replay_key and job.is_wanted}
        jobs, self._jobs, dropped = self._jobs, deque(), []
        for job in jobs:
            if job.is_wanted or job.replay_key in replays:
                self._jobs.append(job)
            else:
                dropped.append(job)
        self._taken += len(dropped)
        return dropped
