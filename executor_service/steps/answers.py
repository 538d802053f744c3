"""`AnswerSender`: brings outcomes from the device thread to the futures of the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any, NamedTuple

from executor_service.fatal import die


class _Answer(NamedTuple):
    future: asyncio.Future[Any]
    outcome: Any  # a result, or the exception
    is_error: bool


class AnswerSender:
    """Collects answers and sends them when the device thread says so.

    Waking the event loop is a system call, in which the device thread loses the interpreter to it. While the
    device thread has more to do, a thread of its own sends instead: it gets the interpreter as soon as the
    device thread waits or computes without it.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._collected: list[_Answer] = []
        self._handed_over: queue.SimpleQueue[list[_Answer] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; futures belong to this loop."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Wait until the thread has sent what it was given, and has ended: the loop may be closed then."""
        self._handed_over.put(None)
        self._thread.join()

    def add(self, future: asyncio.Future[Any], outcome: Any, *, is_error: bool = False) -> None:
        """Collect an answer for the next `send`; device thread."""
        self._collected.append(_Answer(future, outcome, is_error))

    def send(self, *, at_once: bool) -> None:
        """Send what was collected, from this thread or from the other; device thread."""
        if not self._collected:
            return
        answers, self._collected = self._collected, []
        if at_once:
            self._wake(answers)
        else:
            self._handed_over.put(answers)

    def _run(self) -> None:
        try:
            while (answers := self._handed_over.get()) is not None:
                self._wake(answers)
        except BaseException as error:
            die(error)

    def _wake(self, answers: list[_Answer]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_settle, answers)


def _settle(answers: list[_Answer]) -> None:
    for future, outcome, is_error in answers:
        if future.done():  # the client left
            continue
        if is_error:
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
