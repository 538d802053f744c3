"""Awaiting what grpc.aio calls bring, with this package's errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from paceline import errors

_Reply = TypeVar("_Reply")


async def reply_of(operation: Awaitable[_Reply]) -> _Reply:
    """The reply, or grpc.aio.EOF at the end of a stream. Raises `paceline.errors`.

    grpc.aio hands over None for bytes that are no message of the reply's type: InternalError, as the
    blocking client's gRPC makes of them.
    """
    reply = await outcome_of(operation)
    if reply is None:
        raise errors.InternalError("the reply can't be parsed: its bytes are no message of this RPC's type")
    return reply


async def outcome_of(operation: Awaitable[_Reply]) -> _Reply:
    """What the operation gives, which may be None. Raises `paceline.errors`.

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
