"""Awaits the operations of grpc.aio calls, and raises this package's errors in place of gRPC's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from paceline import errors

_Reply = TypeVar("_Reply")


async def reply_of(operation: Awaitable[_Reply]) -> _Reply:
    """The reply, or grpc.aio.EOF at the end of a stream. Raises `paceline.errors`.

    grpc.aio returns None for a reply that can't be parsed. This raises InternalError for it, as the
    blocking client does.
    """
    reply = await outcome_of(operation)
    if reply is None:
        raise errors.InternalError("the reply can't be parsed: its bytes are no message of this RPC's type")
    return reply


async def outcome_of(operation: Awaitable[_Reply]) -> _Reply:
    """The operation's result, which may be None. Raises `paceline.errors`.

    When a call was cancelled or its channel was closed, grpc.aio raises CancelledError in the task that
    awaits it. This raises Unavailable instead, unless the task itself is being cancelled.
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
