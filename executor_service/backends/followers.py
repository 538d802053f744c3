"""`Followers`: the processes of ranks 1 and up, children of the one that serves. Knows no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from paceline.service.logs import Log

from executor_service.backends.ranks import Rank

log = Log(__name__)

_STOP_S = 5.0

OnLoss = Callable[[int, int], None]
"""Called on a thread of its own with (rank, exit status, negative for a signal)."""


class Followers:
    """Started at once, so that their imports run beside ours; none outlives this process.

    Each has a pipe from us as its standard input, and ends when that does. They live in sessions of their
    own: a Ctrl-C reaches rank 0 alone, which drains and then tells them.
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
        """In the order of the ranks."""
        return [process.pid for process in self._processes.values()]

    def close(self) -> None:
        """Wait for their end, which they have been told of; make it so after some seconds."""
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
        """End what is left of them, frozen ones too."""
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
