"""What every handler that reads a stream does about its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.service import SchedulerService
from scheduler_service.streams.stream import RequestStream


@contextmanager
def delivering(service: SchedulerService, stream: RequestStream) -> Iterator[None]:
    """A context manager around the reading of a stream by this task. The request ends with the block.

    Counts the request's failures. Raises ServiceError where the stream was ended because its client did not
    read it, instead of the CancelledError by which the task learns of that.
    """
    stream.reader = asyncio.current_task()
    try:
        yield
    except asyncio.CancelledError:
        ended = stream.error
        if ended is not None and ended.reason is ErrorReason.STALLED_READER:
            service.metrics.ended_badly(ended)
            raise ended from None  # cancelled by us: the client is still there
        raise
    except ServiceError as error:
        service.metrics.ended_badly(error)
        raise
    finally:
        service.streams.close(stream)
