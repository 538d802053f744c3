"""`Beside`: a part of loading that runs in a thread of its own, beside the rest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
from types import TracebackType
from typing import Generic, TypeVar

from executor_service.backends.base import Progress

T = TypeVar("T")
_TOLD_EVERY_S = 0.5


class Beside(Generic[T]):
    """Runs `task` from the beginning of a `with` block; its end waits for the task.

    The task is given a `Progress` that it calls often: where the block raises, that call ends the task.
    """

    def __init__(self, task: Callable[[Progress], T]) -> None:
        self._task, self._abandoned = task, Event()
        self._told = "", 0.0
        self._threads = ThreadPoolExecutor(1, "beside")

    def __enter__(self) -> Beside[T]:
        self._running = self._threads.submit(self._task, self._progress)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandoned.set()
        self._threads.shutdown()

    def result(self, progress: Progress) -> T:
        """Wait for what the task returns, and pass on how far it is; raises what it raises."""
        while not self._running.done():
            wait([self._running], _TOLD_EVERY_S)
            if self._told[0]:
                progress(*self._told)
        return self._running.result()

    def _progress(self, what: str, done: float) -> None:
        self._told = what, done
        if self._abandoned.is_set():
            raise _AbandonedError


class _AbandonedError(Exception):
    """The rest of loading has failed: nobody waits for the task."""
