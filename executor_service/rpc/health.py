"""grpc.health.v1: SERVING means that a step sent now would be computed."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from service_kit.logs import Log
from service_kit.probes import PublishedHealth

from executor_service.runtime.runtime import Runtime, RuntimeState

log = Log(__name__)

_MAX_PERIOD_S = 1.0


async def show_health(runtime: Runtime, health: PublishedHealth) -> None:
    """Copy the runtime's state to `health` when it changes, and again and again for a stuck step.

    Endless. Logs a step that is stuck, once.
    """
    period_s = min(_MAX_PERIOD_S, runtime.config.stuck_after_s / 5)
    was_stuck = False
    while True:
        runtime.changed.clear()
        stuck = runtime.stuck
        if stuck and not was_stuck:
            log.error("a step is stuck", seconds=round(runtime.worker.busy_s, 1))
        was_stuck = stuck
        await health.show(runtime.state is RuntimeState.SERVING and not stuck)
        with suppress(TimeoutError):
            async with asyncio.timeout(period_s):
                await runtime.changed.wait()
