"""Outcomes on their way from the device thread to the event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from executor_service.steps.answers import AnswerSender


class SlowLoop:
    """An event loop that takes a while to be woken."""

    def __init__(self) -> None:
        self.calls = 0

    def call_soon_threadsafe(self, *arguments: object) -> None:
        time.sleep(0.1)
        self.calls += 1


def test_nothing_is_left_to_be_sent_when_the_sender_has_stopped() -> None:
    loop, sender = SlowLoop(), AnswerSender()
    sender.start(cast(asyncio.AbstractEventLoop, loop))
    for _ in range(2):
        sender.add(cast("asyncio.Future[Any]", None), None)
        sender.send(at_once=False)
    sender.stop()
    assert loop.calls == 2
