"""The scheduler's loop: plan, send, deliver, receive, apply. The only place that awaits an executor.

    drive one executor:   expire → plan → send the step → deliver the last step's events
                          → receive the answer → apply → ...
    between executors:    expire, until one is ready or everything waiting has timed out

The next step is on its way before the last one's tokens are delivered, so that the executor works
while text is made of them. What an executor's loss means for sequences is the core's business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from scheduler_service.core.scheduler import Scheduler
from scheduler_service.link.executor import ExecutorLink, ExecutorLostError
from scheduler_service.link.pool import ExecutorPool
from scheduler_service.live import LiveRequests
from scheduler_service.logs import Log
from scheduler_service.metrics import Metrics

log = Log("loop")


class Wake:
    """A reason to look again; set from anywhere on the event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """There is a reason."""
        self._event.set()

    async def wait(self, timeout_s: float | None) -> None:
        """Wait for a reason, for at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass
        self._event.clear()


class Loop:
    """Brings the core, the executors and the live requests together."""

    def __init__(
        self,
        core: Scheduler,
        pool: ExecutorPool,
        live: LiveRequests,
        metrics: Metrics,
        wake: Wake,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._pool = pool
        self._live = live
        self._metrics = metrics
        self._wake = wake
        self._clock = clock

    async def run(self) -> None:
        """Serve; ends only when cancelled, or with a bug's exception."""
        while True:
            link = await self._next_executor()
            try:
                await self._drive(link)
            except ExecutorLostError as loss:
                log.warning("sequences go back to the queue", address=link.address, detail=str(loss))
                self._live.post(self._core.executor_lost(self._clock()))
                self._live.deliver()

    async def _next_executor(self) -> ExecutorLink:
        while (link := self._pool.choose()) is None:
            now = self._clock()
            self._live.post(self._core.expire(now))
            self._live.deliver()
            await self._wake.wait(self._until_wakeup(now))
        return link

    async def _drive(self, link: ExecutorLink) -> None:
        core, live = self._core, self._live
        link.open_stream()
        assert link.capacity is not None
        live.post(core.executor_ready(link.capacity, self._clock()))
        unanswered: list[tuple[float, int]] = []  # when each was sent, and its rows
        while True:
            if self._pool.should_leave(link) and not unanswered:
                await link.leave("draining")
                link.check()
            now = self._clock()
            live.post(core.expire(now))
            while (plan := core.plan(now)) is not None:
                unanswered.append((now, len(plan.rows) + len(plan.openings)))
                await link.send(plan)
                now = self._clock()
            live.deliver()
            if unanswered:
                result = await link.receive()
                now = self._clock()
                live.post(core.apply(result, now))
                sent_at, rows = unanswered.pop(0)
                self._metrics.step(now - sent_at, result.compute_s, rows)
            else:
                await self._wake.wait(self._until_wakeup(now))
                link.check()

    def _until_wakeup(self, now: float) -> float | None:
        wakeup = self._core.next_wakeup(now)
        return None if wakeup is None else max(0.0, wakeup - now)
