"""The scheduler's loop: plan, send, deliver, receive, apply. The only place that awaits an executor.

    drive one executor:   expire → plan drafts → plan → send the step → deliver the last step's events
                          → receive the answer → apply → ...
    without an executor:  expire, until one is ready

The next step is sent before the last one's tokens are delivered, so that the executor computes while the
scheduler detokenizes. The core decides what an executor's loss means for sequences. Drafts have a loop of
their own, in `draft_loop.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from service_kit.logs import Log

from scheduler_service.core.errors import UnknownStep
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.link.exchange import ExecutorLostError
from scheduler_service.link.executor import ExecutorLink
from scheduler_service.link.pool import ExecutorPool
from scheduler_service.loop.draft_loop import DraftLoop
from scheduler_service.loop.wake import Wake
from scheduler_service.metrics.metrics import Telemetry
from scheduler_service.streams.registry import StreamRegistry

if TYPE_CHECKING:  # it imports OpenTelemetry
    from scheduler_service.spans import Spans

log = Log(__name__)


class Loop:
    """Drives the active executor: sends the core's plans, applies answers, passes events to the streams."""

    def __init__(
        self,
        core: StepScheduler,
        pool: ExecutorPool,
        drafts: DraftLoop,
        streams: StreamRegistry,
        metrics: Telemetry,
        wake: Wake,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
    ) -> None:
        self._core = core
        self._pool = pool
        self._drafts = drafts
        self._streams = streams
        self._metrics = metrics
        self._wake = wake
        self._clock = clock
        self._spans = spans

    async def run(self) -> None:
        """Drive executors; ends only when cancelled, or with the exception of a bug."""
        while True:
            link = await self._next_executor()
            try:
                await self._drive(link)
            except ExecutorLostError as loss:
                if self._spans is not None:
                    self._spans.steps_lost(self._clock())
                if live := len(self._streams):
                    log.warning("requests go back to the queue", live=live, detail=str(loss))
                self._streams.post(self._core.executor_lost(self._clock()))
                self._streams.deliver()

    async def _next_executor(self) -> ExecutorLink:
        while (link := self._pool.choose()) is None:
            now = self._clock()
            self._streams.post(self._core.expire(now))
            self._streams.deliver()
            await self._wake.wait(self._until_wakeup(now))
        return link

    async def _drive(self, link: ExecutorLink) -> None:
        core, streams, drafts = self._core, self._streams, self._drafts
        exchange = link.open_exchange()
        streams.post(core.executor_ready(exchange.capacity, self._clock()))
        unanswered: deque[tuple[float, int]] = deque()  # when each was sent, and its rows
        answered_at = 0.0
        while True:
            now = self._clock()
            if link.draining:
                core.executor_retires()
                if not unanswered and self._pool.should_leave(link, holds_caches=core.holds_caches):
                    await link.close_session("draining")
                    exchange.check()
            streams.post(core.expire(now))
            drafting = drafts.plan(now)  # first: sequences that wait for drafts are left out of this step
            while (plan := core.plan(now)) is not None:
                unanswered.append((now, len(plan.rows) + len(plan.openings)))
                await exchange.send(plan, self._traceparent(now))
                now = self._clock()
                if plan.openings:  # the draft executor may compute their prompts at the same time
                    drafting = drafts.plan(now)
            if drafting:
                await asyncio.sleep(0)  # lets the draft loop send before `deliver` detokenizes
            streams.deliver()
            if unanswered:
                result = await exchange.receive()
                now = self._clock()
                try:
                    streams.post(core.apply(result, now))
                except UnknownStep as error:
                    link.lose(f"an answer that does not fit its step: {error}")
                    exchange.check()
                sent_at, rows = unanswered.popleft()
                if self._spans is not None:
                    self._spans.step_answered(now, rows)
                self._metrics.step(now - max(sent_at, answered_at), result.compute_s, rows)
                answered_at = now
                if result.lacks_adapter:
                    link.restore_adapters()
            else:
                await self._wake.wait(self._until_wakeup(now))
                exchange.check()

    def _traceparent(self, now: float) -> str:
        """Of the span of the step that was just planned; "": it has none."""
        if self._spans is None:
            return ""
        return self._spans.step_planned(lambda: self._streams.traced_calls(self._core.requests_sent()), now)

    def _until_wakeup(self, now: float) -> float | None:
        wakeup = self._core.next_wakeup(now)
        return None if wakeup is None else max(0.0, wakeup - now)
