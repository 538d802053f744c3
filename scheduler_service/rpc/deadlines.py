"""The deadline of a call."""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import grpc.aio

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def deadline_of(context: _Context) -> float | None:
    """The call's deadline on the clock of time.monotonic; None without one."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
