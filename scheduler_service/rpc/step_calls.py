"""WatchSteps: who reads the step log, from where on, and how much at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc.aio
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.credentials import Credentials
from service_kit.identity import Identity

from scheduler_service.core.step_log import StepLog
from scheduler_service.errors import RETRY_AFTER_S, ErrorReason, ServiceError, invalid
from scheduler_service.rpc.codec.steps import step_log

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_READERS, MAX_READERS_PER_IDENTITY = 64, 16
LOOK_S = 0.25
"""Between two looks of a reader that has read all steps."""


class StepCalls:
    """WatchSteps. Each reader looks into the log by itself; one that is too slow finds a gap."""

    def __init__(self, log: StepLog, credentials: Credentials) -> None:
        self._log, self._credentials = log, credentials
        self._readers: Counter[str] = Counter()  # by identity

    async def watch(self, request: pb.WatchStepsRequest, context: _Context) -> None:
        """Send steps until the client leaves, or has as many as it wants. Raises ServiceError."""
        caller = self._credentials.identify(context)
        wanted, left = self._begin(request), request.max_steps
        with self._reading(caller):
            while left or not request.max_steps:
                part = self._log.read(wanted, left or len(self._log))
                if part is None:
                    await asyncio.sleep(LOOK_S)
                    continue
                lost = part.first_step - wanted
                message = step_log(part, lost, caller, time.time() - time.monotonic())
                wanted = part.first_step + len(part)
                left -= min(left, len(part))
                await context.write(message)

    def _begin(self, request: pb.WatchStepsRequest) -> int:
        """The first step to send. Raises ServiceError."""
        log = self._log
        if request.first_step and request.last_us:
            raise invalid("last_us", "not with first_step")
        if request.first_step > log.end:
            raise invalid("first_step", f"is {request.first_step}, and the next step is {log.end}")
        if request.last_us:
            return log.since(time.monotonic() - request.last_us / 1e6)
        return request.first_step or log.first

    @contextmanager
    def _reading(self, caller: Identity) -> Iterator[None]:
        """Count a reader. Raises ServiceError if there are too many: others lock no administrator out."""
        readers, name = self._readers, caller.name
        most = ""
        if readers[name] >= MAX_READERS_PER_IDENTITY:
            most = f"{MAX_READERS_PER_IDENTITY} of an identity may"
        elif readers.total() >= MAX_READERS and not caller.admin:
            most = f"{MAX_READERS} in all may"
        if most:
            why = f"too many calls watch the steps: {most}"
            raise ServiceError(ErrorReason.WATCHERS, why, retry_after_s=RETRY_AFTER_S)
        readers[name] += 1
        try:
            yield
        finally:
            readers[name] -= 1
            if not readers[name]:
                del readers[name]
