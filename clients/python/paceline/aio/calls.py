"""Awaiting what grpc.aio calls bring, with this package's errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from paceline import errors

_Reply = TypeVar("_Reply")


async def reply_of(operation: Awaitable[_Reply]) -> _Reply:
    """The reply. Raises `paceline.errors`.

    A call that ends because somebody closed its channel, or cancelled it, raises CancelledError in grpc.aio,
    as if the task that awaits it were cancelled. Here that is Unavailable, unless the task really is.
    """
    try:
        return await operation
    except grpc.RpcError as error:
        raise errors.from_rpc(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise errors.Unavailable("the connection was closed") from None
