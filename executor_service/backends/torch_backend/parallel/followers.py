"""`Followers`: the processes of ranks 1 and up, children of rank 0. Does not import torch."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from service_kit.logs import Log

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
        self._processes = {rank.number: _start(command, rank) for rank in ranks}
        self._watchers = [
            threading.Thread(target=self._watch, args=item, name=f"rank-{item[0]}", daemon=True)
            for item in self._processes.items()
        ]
        for watcher in self._watchers:
            watcher.start()

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes.values()]

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


def _start(command: Sequence[str], rank: Rank) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, **rank.environment()}
    )
    log.info("rank started", rank=rank.number, pid=process.pid)
    return process
