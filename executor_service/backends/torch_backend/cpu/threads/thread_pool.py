"""`ThreadPool`: the helper threads of the CPU kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from executor_service.backends.torch_backend.cpu.primitives.records import Record, address_of
from executor_service.backends.torch_backend.cpu.threads.call_table import CallTable
from executor_service.backends.torch_backend.cpu.threads.dispatch import COMMON, FUNCTIONS, require
from executor_service.backends.torch_backend.cpu.threads.work import OVER, STATE_SIZE, work


class ThreadPool:
    """The caller and `threads` - 1 helpers, which sleep between steps. One thread calls all methods."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._state = np.zeros(STATE_SIZE, np.int64)
        self._state[OVER] = 1
        self._address = address_of(self._state)
        self._no_calls = CallTable([])
        self._wake = threading.Semaphore(0)
        self._closed = False
        self._work_until_step_ends()  # compiles `work`; no step is under way, so it returns
        for kernel in COMMON:
            require(kernel)
        self._helpers = [
            threading.Thread(target=self._run_helper, name=f"cpu-helper-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for helper in self._helpers:
            helper.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep the helpers awake for the calls made inside; without it, the caller computes them alone."""
        self._state[OVER] = 0
        if self._helpers:
            self._wake.release(len(self._helpers))
        try:
            yield
        finally:
            self._state[OVER] = 1

    def run(self, *calls: Record) -> None:
        """Make calls one after the other; each is a record of a kind in `dispatch.KERNELS`."""
        self.run_table(CallTable(calls))

    def run_table(self, table: CallTable) -> None:
        """The same with calls that are in a table already.

        Raises ValueError if its words are damaged, and the error of a kernel, also of one in a helper
        thread; the calls after that one are not made.
        """
        work(FUNCTIONS, self._address, table.words)

    def close(self) -> None:
        """End the helpers."""
        self._closed = True
        self._state[OVER] = 1
        if self._helpers:
            self._wake.release(len(self._helpers))
        for helper in self._helpers:
            helper.join()

    def _run_helper(self) -> None:
        """A helper thread: sleep until a step begins, compute until it ends, and again, until `close`."""
        while True:
            self._wake.acquire()
            if self._closed:
                return
            self._work_until_step_ends()

    def _work_until_step_ends(self) -> None:
        """Compute chunks of the caller's calls until OVER is set; the thread has no calls of its own."""
        self.run_table(self._no_calls)
