"""Calls that wait for a model that is loading, as their clients ask."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypeAlias

import grpc.aio
from paceline.failover import WAIT_KEY

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_WAITING = 1024
"""Calls of all callers that wait at once. Their messages are unread if they are calls that are queued."""
MAX_WAIT_S = 3600.0
_MARGIN_S = 0.25
"""Time before a call's own deadline at which its wait ends, so that the client gets a reason."""


class LoadWait:
    """Holds a call until `settled` is set, for as long as its metadata says; by default not at all.

    A call goes on afterwards as if it had just come: what is not ready then refuses it.
    """

    def __init__(self, settled: asyncio.Event) -> None:
        self._settled, self._waiting = settled, 0

    async def __call__(self, context: _Context) -> None:
        """Wait, if the call asks for it."""
        if self._settled.is_set() or self._waiting >= MAX_WAITING:
            return
        wait_s = _wanted_s(context)
        if (left_s := context.time_remaining()) is not None:
            wait_s = min(wait_s, left_s - _MARGIN_S)
        if wait_s <= 0:
            return
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._settled.wait()
        finally:
            self._waiting -= 1


def _wanted_s(context: _Context) -> float:
    """The seconds that a call's metadata names; 0 for none, and for what is no number of milliseconds."""
    for key, value in context.invocation_metadata() or ():
        if key == WAIT_KEY and len(value) <= 9 and value.isascii() and value.isdigit():
            return min(int(value) / 1000, MAX_WAIT_S)
    return 0.0
