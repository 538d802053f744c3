"""Outcomes on their way from the device thread to the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any, cast

from executor_service.steps.answers import AnswerSender


class Answers(queue.SimpleQueue[Any]):
    """The sender's queue; knows when the sender was told to stop."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        if item is None:
            self.stopped.set()


class LateLoop:
    """An event loop that is not woken before the sender is told to stop."""

    def __init__(self, stopped: threading.Event) -> None:
        self.calls, self._stopped = 0, stopped

    def call_soon_threadsafe(self, *arguments: object) -> None:
        self._stopped.wait()
        self.calls += 1


def test_nothing_is_left_to_be_sent_when_the_sender_has_stopped() -> None:
    answers, sender = Answers(), AnswerSender()
    sender._handed_over = answers
    loop = LateLoop(answers.stopped)
    sender.start(cast(asyncio.AbstractEventLoop, loop))
    for _ in range(2):
        sender.add(cast("asyncio.Future[Any]", None), None)
        sender.send(at_once=False)
    sender.stop()
    assert loop.calls == 2
