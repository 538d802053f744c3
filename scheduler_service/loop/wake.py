"""An event that wakes a task of the event loop."""

from __future__ import annotations

import asyncio


class Wake:
    """An event that is cleared by the wait that it ends. To be used on the event loop only."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """End the current wait, or the next one."""
        self._event.set()

    async def wait(self, timeout_s: float | None) -> None:
        """Wait for `set`, for at most `timeout_s` seconds (None: without limit)."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass
        self._event.clear()
