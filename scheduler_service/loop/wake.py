"""How one task of the scheduler tells another that there is something to look at."""

from __future__ import annotations

import asyncio


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
