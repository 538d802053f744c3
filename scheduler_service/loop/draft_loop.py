"""The draft executor's loop, beside the main one: plan → send → receive → apply.

    main loop   ... apply → DraftLoop.plan → plan → send → deliver → receive ...
    this one                  └► send → receive → apply → wake the main loop

Drafts are planned by the main loop just before its own step, because sequences that wait for drafts are left
out of that step. The draft executor never delays the main loop otherwise; the core limits how long a
sequence waits for drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from service_kit.logs import Log

from scheduler_service.core.errors import UnknownStep
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.step import PlannedStep
from scheduler_service.link.drafts import DraftPool
from scheduler_service.link.exchange import ExecutorLostError, StepExchange
from scheduler_service.link.executor import ExecutorLink
from scheduler_service.loop.wake import Wake
from scheduler_service.metrics.metrics import Telemetry

log = Log(__name__)


class DraftLoop:
    """Drives one draft executor of the pool at a time.

    `wake` must be set when the pool has changed; `wake_main` is called when the core has new drafts, or the
    draft executor was lost.
    """

    def __init__(
        self,
        core: StepScheduler,
        pool: DraftPool,
        metrics: Telemetry,
        wake: Wake,
        wake_main: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._pool = pool
        self._metrics = metrics
        self._wake = wake
        self._wake_main = wake_main
        self._clock = clock
        self._planned: PlannedStep | None = None  # not sent yet

    def plan(self, now: float) -> bool:
        """Ask the core for a draft step. Returns whether there is one, which `run` sends at its next turn."""
        if self._planned is None and (plan := self._core.plan_draft(now)) is not None:
            self._planned = plan
            self._wake.set()
        return self._planned is not None

    async def run(self) -> None:
        """Drive draft executors; ends only when cancelled, or with the exception of a bug."""
        while True:
            link = await self._next_executor()
            try:
                await self._drive(link)
            except ExecutorLostError as loss:
                log.info("decoding without drafts", address=link.address, detail=str(loss))
            finally:
                self._planned = None
                self._core.draft_lost()
                self._wake_main()

    async def _next_executor(self) -> ExecutorLink:
        while (link := self._pool.choose()) is None:
            await self._wake.wait(None)
        return link

    async def _drive(self, link: ExecutorLink) -> None:
        exchange = link.open_exchange()
        self._core.draft_ready(exchange.capacity)
        self._wake_main()
        while True:
            if self._pool.should_leave(link, holds_caches=True):
                await link.close_session("draining")
            exchange.check()
            if not self.plan(self._clock()):
                await self._wake.wait(None)
                continue
            plan, self._planned = self._planned, None
            assert plan is not None
            await self._step(link, exchange, plan)

    async def _step(self, link: ExecutorLink, exchange: StepExchange, plan: PlannedStep) -> None:
        sent_at = self._clock()
        await exchange.send(plan)
        result = await exchange.receive()
        now = self._clock()
        try:
            self._core.apply_draft(result, now)
        except UnknownStep as error:
            link.lose(f"an answer that does not fit its step: {error}")
        else:
            self._metrics.draft_step_s.observe(now - sent_at)
        self._wake_main()
