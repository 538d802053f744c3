"""`Pool`: the helper threads of the CPU kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from executor_service.backends.torch_backend.cpu.threads import jobs as cpu_jobs


class Pool:
    """The caller and `threads` - 1 helpers, which sleep between steps. One thread calls all methods."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._state = np.zeros(cpu_jobs.STATE + 8, np.int64)
        self._state[cpu_jobs.OVER] = 1
        self._address = self._state.ctypes.data
        self._wake = threading.Semaphore(0)
        self._closed = False
        self._help_out()  # compiles it; with no step under way it returns at once
        self._helpers = [
            threading.Thread(target=self._help, name=f"cpu-helper-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for helper in self._helpers:
            helper.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Have the helpers at hand for the jobs run inside; without it, the caller does them alone."""
        self._state[cpu_jobs.OVER] = 0
        if self._helpers:
            self._wake.release(len(self._helpers))
        try:
            yield
        finally:
            self._state[cpu_jobs.OVER] = 1

    def run(self, *jobs: cpu_jobs.Job) -> None:
        """Do jobs one after the other."""
        cpu_jobs.work(self._address, cpu_jobs.table(jobs))

    def run_table(self, jobs: NDArray[np.int64]) -> None:
        """The same with jobs in the form of `jobs.table`."""
        cpu_jobs.work(self._address, jobs)

    def close(self) -> None:
        """End the helpers."""
        self._closed = True
        self._state[cpu_jobs.OVER] = 1
        if self._helpers:
            self._wake.release(len(self._helpers))
        for helper in self._helpers:
            helper.join()

    def _help(self) -> None:
        while True:
            self._wake.acquire()
            if self._closed:
                return
            self._help_out()

    def _help_out(self) -> None:
        cpu_jobs.work(self._address, cpu_jobs.table([]))
