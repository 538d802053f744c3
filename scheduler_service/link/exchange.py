"""The exchange of steps and answers with one executor, from the opening of its stream to its loss."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from paceline import errors
from paceline.aio.executor import StepStream
from paceline.session import Session

from scheduler_service.core.step import Capacity, PlannedStep, StepAnswer
from scheduler_service.link.codec.steps import decode_result, encode_step
from scheduler_service.link.facts import Bounds


class ExecutorLostError(Exception):
    """The executor was lost; the message says how."""


@dataclass(frozen=True, slots=True)
class _UnansweredStep:
    plan: PlannedStep
    step_id: int
    sent_at: float  # time.monotonic()


class StepExchange:
    """Sends the steps of one session, and receives their answers in the same order.

    When the exchange fails, it calls `lose` with the reason, and `lose` calls `close`. Once closed, every
    method raises ExecutorLostError; another session needs another exchange.
    """

    def __init__(
        self,
        stream: StepStream,
        session: Session,
        capacity: Capacity,
        bounds: Bounds,
        lose: Callable[[str], None],
        *,
        grammars: bool = True,
    ) -> None:
        self.capacity = capacity
        self._grammars = grammars  # whether the executor has them
        self._stream = stream
        self._session = session
        self._bounds = bounds
        self._lose = lose
        self._unanswered: deque[_UnansweredStep] = deque()
        self._closed_by: str | None = None

    @property
    def step_age_s(self) -> float:
        """Seconds since the oldest unanswered step was sent; 0 without one."""
        return time.monotonic() - self._unanswered[0].sent_at if self._unanswered else 0.0

    def close(self, detail: str) -> None:
        """End the exchange, because of `detail`."""
        self._closed_by = detail
        self._unanswered.clear()
        self._stream.close()

    def check(self) -> None:
        """Raises ExecutorLostError if the exchange is closed."""
        if self._closed_by is not None:
            raise ExecutorLostError(self._closed_by)

    async def send(self, plan: PlannedStep, traceparent: str = "") -> None:
        """Send one step; returns when gRPC has taken it. Raises ExecutorLostError.

        traceparent: of the step's span.
        """
        self.check()
        header = self._session.header()
        header.traceparent = traceparent
        step = encode_step(plan, header, grammars=self._grammars)
        self._unanswered.append(_UnansweredStep(plan, header.step_id, time.monotonic()))
        try:
            await self._stream.send(step)
        except errors.PacelineError as error:
            self._fail(f"the stream broke: {error}")

    async def receive(self) -> StepAnswer:
        """The answer to the oldest unanswered step. Raises ExecutorLostError."""
        self.check()
        try:
            message = await self._stream.recv()
            sent = self._unanswered.popleft()
            if (message.step_id, message.epoch) != (sent.step_id, self._session.epoch):
                raise ValueError(f"step {message.step_id}, epoch {message.epoch}, which was not sent")
            return decode_result(sent.plan, message, self._bounds)
        except errors.PacelineError as error:
            # Also a step that was refused as a whole: the session has ended, or the executor and the core
            # disagree on its state. Only a new session helps.
            self._fail(f"the stream broke: {error}")
        except (ValueError, IndexError) as error:
            self._fail(f"an answer that does not fit its step: {error}")

    def _fail(self, detail: str) -> NoReturn:
        self.check()
        self._lose(detail)
        raise ExecutorLostError(detail)
