"""`Followers`: the processes of ranks 1 and up, children of rank 0. Does not import torch."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from service_kit.logs import Log
from service_kit.procfs import process_state
from service_kit.standstill import LOOK_S, MAX_STILL_S

from executor_service.backends.torch_backend.parallel.ranks import Rank

log = Log(__name__)

_STOP_S = 5.0

OnLoss = Callable[[int, int], None]
"""Called on a watcher thread with (rank, exit status); a negative status is a signal's number."""


class Followers:
    """Starts the processes in parallel with rank 0's imports; none outlives this process.

    Each reads a pipe from rank 0 as standard input and exits at its end. Each has a process session of its
    own, so that Ctrl-C reaches rank 0 alone, which drains and then ends the followers.
    """

    def __init__(self, command: Sequence[str], ranks: Sequence[Rank], on_loss: OnLoss) -> None:
        self._on_loss = on_loss
        self._closing = False
        self._calls = self._open_calls = 0
        self._ended = threading.Event()
        self._processes = {rank.number: _start(command, rank) for rank in ranks}
        self._watchers = [
            threading.Thread(target=self._watch, args=item, name=f"rank-{item[0]}", daemon=True)
            for item in self._processes.items()
        ]
        if self._processes:
            self._watchers.append(threading.Thread(target=self._watch_stops, name="ranks", daemon=True))
        for watcher in self._watchers:
            watcher.start()

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes.values()]

    @contextmanager
    def working(self) -> Iterator[None]:
        """The ranks have the work of this context, and perhaps more that it began."""
        self._calls += 1
        self._open_calls += 1
        try:
            yield
        finally:
            self._open_calls -= 1

    def close(self) -> None:
        """Close the pipes, wait up to 5 s for each process to exit, then kill those that remain."""
        self._closing = True
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        self.kill()
        self._ended.set()
        for watcher in self._watchers:
            watcher.join()

    def kill(self) -> None:
        """Send SIGKILL to all processes; it ends stopped ones too."""
        self._closing = True
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._closing:
            self.kill()
            self._on_loss(rank, status)

    def _watch_stops(self) -> None:
        """Kill a rank that was stopped by a signal for MAX_STILL_S while it had work.

        Ranks wait for each other without using a processor, so that nothing else tells who stands still. One
        that does for another reason keeps the others waiting, which the collectives bound by their timeout.
        """
        still_s = dict.fromkeys(self._processes, 0.0)
        calls_at_stop = dict.fromkeys(self._processes, 0)
        looked_at = time.monotonic()
        while not self._ended.wait(LOOK_S):
            elapsed_s, looked_at = min(time.monotonic() - looked_at, 3 * LOOK_S), time.monotonic()
            for rank, process in self._processes.items():
                state = process_state(process.pid)
                if state is None or not state.is_stopped:
                    still_s[rank], calls_at_stop[rank] = 0.0, self._calls
                elif self._open_calls or self._calls > calls_at_stop[rank]:
                    still_s[rank] += elapsed_s
                if still_s[rank] > MAX_STILL_S:
                    log.warning("a rank stands still: it is killed", rank=rank, pid=process.pid)
                    process.kill()  # which _watch notices
                    return


def _start(command: Sequence[str], rank: Rank) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, **rank.environment()}
    )
    log.info("rank started", rank=rank.number, pid=process.pid)
    return process
