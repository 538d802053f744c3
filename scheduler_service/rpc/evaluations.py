"""Handlers of Score, Embed and Rerank: check, tokenize, queue all inputs at once, wait for them, answer."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import grpc.aio
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.credentials import Credentials
from service_kit.identity import Identity

from scheduler_service.core.evaluation import Evaluation
from scheduler_service.errors import ServiceError, invalid
from scheduler_service.link.pool import Served
from scheduler_service.model import ServedModel
from scheduler_service.rpc.arriving import ArrivingCall, ArrivingCalls, deadline_of
from scheduler_service.rpc.codec.adapters import AdapterNames, check_still_served
from scheduler_service.rpc.codec.checks import check_size
from scheduler_service.rpc.codec.evaluation import EvaluationTask
from scheduler_service.rpc.codec.requests import check_priority
from scheduler_service.rpc.codec.waits import wait_times
from scheduler_service.rpc.statuses import text_errors
from scheduler_service.service import SchedulerService
from scheduler_service.streams.evaluation import EvaluatedInput, EvaluationStream

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

PARTS_AT_ONCE = 16
"""Parts of a reply that are encoded before other tasks of the event loop get a turn."""


class Evaluations:
    """Runs evaluations. `refused` counts a refused call, and delays it if its caller gets too many."""

    def __init__(
        self,
        service: SchedulerService,
        credentials: Credentials,
        refused: Callable[[Identity, ServiceError], Awaitable[None]],
        arriving: ArrivingCalls,
    ) -> None:
        self._service, self._credentials, self._refused = service, credentials, refused
        self._arriving = arriving

    async def answer(
        self, make_task: Callable[[ServedModel, AdapterNames], EvaluationTask], context: _Context
    ) -> bytes:
        """The encoded reply to a call. Its request ends when this coroutine does, for whatever reason."""
        call, caller = ArrivingCall(), self._credentials.identify(context)
        arrival, deadline = call.arrival, deadline_of(context)
        streams = self._service.streams
        try:
            served = self._service.served_for_request(caller)
            task = make_task(served.model, self._service.wanted)
            check_priority(task.call.priority, caller)
            streams.check(caller, task.call, task.min_tokens, deadline)  # before tokenizing
            with self._arriving.entered(call, caller.name, task.call.id, task.call.labels):
                ids = await _token_ids(task, served, caller)
            evaluation = self._fitting(task, ids)
            check_still_served(task.call.adapter, served.model, self._service.wanted)
            stream: EvaluationStream | None = None
            if evaluation is not None:
                stream = streams.admit_evaluation(
                    task.call,
                    evaluation,
                    task.alternatives,
                    caller,
                    arrival=arrival,
                    deadline=deadline,
                    phases=call.phases,
                )
                self._service.wanted.count(task.call.adapter)
        except ServiceError as error:
            await self._refused(caller, error)
            raise
        if stream is None:
            return await _encoded(task, (), arrival)
        try:
            results = await stream.results()
            await context.send_initial_metadata((("request-id", stream.request_id),))
            return await _encoded(task, results, arrival)
        except ServiceError as error:
            self._service.metrics.ended_badly(error)
            raise
        finally:
            streams.close(stream)

    def _fitting(self, task: EvaluationTask, ids: Sequence[array[int]]) -> Evaluation | None:
        core = self._service.core
        evaluation = task.evaluation(ids, core.max_request_tokens)
        if evaluation is not None:
            most = self._service.settings.core.max_queued_tokens
            check_size(task.field, evaluation.tokens, most, "tokens in all (max_queued_tokens)")
        return evaluation


async def _token_ids(task: EvaluationTask, served: Served, caller: Identity) -> Sequence[array[int]]:
    if not task.items:
        return ()
    if served.text is None:
        raise invalid(task.items[0].field, "the model has no tokenizer: send token_ids")
    with text_errors(task.field):
        return await served.text.encode_items(
            task.items, served.model.limits.max_prompt_bytes, caller=caller.name
        )


async def _encoded(task: EvaluationTask, results: Sequence[EvaluatedInput], arrival: float) -> bytes:
    usages = [result.usage for result in results if result.usage is not None]
    first = min(usages, key=attrgetter("queue_s"), default=None)
    usage = pb.InputUsage(
        cached_tokens=sum(one.cached_tokens for one in usages),
        queue_ms=_ms(0.0 if first is None else first.queue_s),
        total_ms=_ms(time.monotonic() - arrival),
        queue_waits=() if first is None else wait_times(first.queue_waits),
    )
    parts = []
    for number, part in enumerate(task.response(results, usage)):
        parts.append(part)
        if not number % PARTS_AT_ONCE:
            await asyncio.sleep(0)
    return b"".join(parts)


def _ms(seconds: float) -> int:
    return max(0, round(1000 * seconds))
