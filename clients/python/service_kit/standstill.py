"""When a helper process stands still, and has to be replaced. One rule for all of them.

A process stands still if, for MAX_STILL_S of wall time while it has work, it neither uses a processor nor
waits for one: it was stopped (SIGSTOP), is swapped out, or waits for itself. Time in which the process that
looks was itself paused does not count. Where the system shows no process others' states, wall time decides.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from service_kit.logs import Log
from service_kit.procfs import process_state

log = Log(__name__)

LOOK_S = 0.1
"""Between two looks. Three times as much counts between two looks at most."""
MAX_STILL_S = 5.0
MAX_UNSEEN_S = 120.0
"""Instead, where the process's state is not known."""


class Standstill:
    """How long one process has stood still."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s = -1.0
        self._still_s = self._unseen_s = 0.0

    def rests(self) -> None:
        """The process has no work now."""
        self._still_s = self._unseen_s = 0.0

    def look(self, elapsed_s: float) -> bool:
        """Look again after `elapsed_s` in which the process had work. Whether it has stood still too long."""
        elapsed_s = min(elapsed_s, 3 * LOOK_S)
        state = process_state(self._pid)
        if state is None:
            self._unseen_s += elapsed_s
            return self._unseen_s > MAX_UNSEEN_S
        works = not state.is_stopped and (state.is_runnable or state.cpu_s != self._cpu_s)
        self._cpu_s = state.cpu_s
        self._still_s = 0.0 if works else self._still_s + elapsed_s
        return self._still_s > MAX_STILL_S


class Watch(threading.Thread):
    """A thread that kills a process that stands still."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(name="standstill", daemon=True)
        self._process = process
        self._done = threading.Event()
        self.has_killed = False

    def end(self) -> None:
        """Look no more."""
        self._done.set()
        self.join()

    def run(self) -> None:
        """Look until the end."""
        standstill, looked_at = Standstill(self._process.pid), time.monotonic()
        while not self._done.wait(LOOK_S):
            before, looked_at = looked_at, time.monotonic()
            if standstill.look(looked_at - before):
                log.warning("a helper process stands still: it is killed", pid=self._process.pid)
                self.has_killed = True
                self._process.kill()
                return


@contextmanager
def killed_if_still(process: subprocess.Popen[bytes]) -> Iterator[Watch]:
    """Kill the process if it stands still while it has the work of this context."""
    watch = Watch(process)
    watch.start()
    try:
        yield watch
    finally:
        watch.end()
