"""Handlers of the gateway's worker protocol (vllm.grpc.engine), over the same streams as the public API."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, TypeAlias

import grpc.aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as worker_pb

from scheduler_service.errors import ErrorReason, ServiceError, unsupported
from scheduler_service.gateway.archive import in_chunks, tokenizer_archive
from scheduler_service.gateway.callers import GATEWAY, GatewayCallers
from scheduler_service.gateway.codec.answers import WorkerAnswer
from scheduler_service.gateway.codec.embeddings import WorkerEmbedTask
from scheduler_service.gateway.codec.info import worker_loads, worker_model, worker_server
from scheduler_service.gateway.codec.requests import in_openai_words, public_request
from scheduler_service.link.pool import Served
from scheduler_service.model import TokenizerSource
from scheduler_service.rpc.codec.requests import check_aborts
from scheduler_service.rpc.delivery import delivering
from scheduler_service.rpc.evaluations import Evaluations
from scheduler_service.rpc.servicer import SchedulerServicer
from scheduler_service.service import SchedulerService

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class WorkerServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # the package is untyped
    """One worker of a gateway. Its requests are admitted by the public API's servicer, as that one's are."""

    def __init__(
        self, service: SchedulerService, door: SchedulerServicer, callers: GatewayCallers, name: str
    ) -> None:
        """`name`: the model's, for clients of the gateway; "": its own."""
        self._service, self._door, self._callers, self._name = service, door, callers, name
        self._evaluations = Evaluations(service, callers, door.refused)
        self._archive: tuple[TokenizerSource, bytes] | None = None  # of these files

    async def admit(self, context: _Context) -> None:
        """As SchedulerServicer.admit."""
        self._callers.check(context)
        await self._door.take_turn(GATEWAY, context)

    async def Generate(self, request: worker_pb.GenerateRequest, context: _Context) -> None:
        """Stream a request's output, as token ids."""
        self._callers.check(context)
        try:
            stream = await self._door.open_stream(public_request(request), GATEWAY, context)
            answer = WorkerAnswer(streams=request.stream)
            with delivering(self._service, stream):
                while outputs := await stream.take():
                    for message in answer.messages(outputs):
                        await context.write(message)
        except ServiceError as error:
            raise in_openai_words(error) from None

    async def Abort(self, request: worker_pb.AbortRequest, context: _Context) -> worker_pb.AbortResponse:
        """End requests of the gateway by id."""
        self._callers.check(context)
        check_aborts(request.request_ids)
        for request_id in request.request_ids:
            self._service.streams.abort(request_id, GATEWAY.name, "aborted by the gateway")
        return worker_pb.AbortResponse()

    async def HealthCheck(
        self, request: worker_pb.HealthCheckRequest, context: _Context
    ) -> worker_pb.HealthCheckResponse:
        """Whether a request sent now would get tokens: the scheduler's own health."""
        self._callers.check(context)
        service = self._service
        return worker_pb.HealthCheckResponse(healthy=service.healthy, message=service.state.value)

    async def GetModelInfo(
        self, request: worker_pb.GetModelInfoRequest, context: _Context
    ) -> worker_pb.GetModelInfoResponse:
        """The served model."""
        model = self._served(context).model
        return worker_model(model, self._name or model.name, self._service.core.max_request_tokens)

    async def GetServerInfo(
        self, request: worker_pb.GetServerInfoRequest, context: _Context
    ) -> worker_pb.GetServerInfoResponse:
        """The server's limits."""
        model, service = self._served(context).model, self._service
        uptime_s = time.monotonic() - service.started_at
        return worker_server(model, service.core.snapshot(), len(service.streams), uptime_s)

    async def GetLoads(
        self, request: worker_pb.GetLoadsRequest, context: _Context
    ) -> worker_pb.GetLoadsResponse:
        """The load, by which the gateway chooses among workers."""
        version, service = self._served(context).model.version, self._service
        return worker_loads(version, service.core.snapshot(), service.rates.completion_tokens_per_s)

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: _Context) -> None:
        """The tokenizer's files as a ZIP archive, in chunks."""
        served = self._served(context)
        if served.files is None:
            raise ServiceError(ErrorReason.TOKENIZER_NOT_FOUND, "the model has no tokenizer")
        if self._archive is None or self._archive[0] is not served.files:
            model = served.model
            archive = await asyncio.to_thread(
                tokenizer_archive, served.files, model.architecture, sorted(model.eos_token_ids)
            )
            self._archive = served.files, archive
        for data, digest in in_chunks(self._archive[1]):
            await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=digest))

    async def Embed(self, request: worker_pb.EmbedRequest, context: _Context) -> bytes:
        """The vector of one input: of its last token, with length 1."""
        self._callers.check(context)
        try:
            return await self._evaluations.answer(partial(WorkerEmbedTask, request), context)
        except ServiceError as error:
            raise in_openai_words(error) from None

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: _Context
    ) -> None:
        """Not offered: the gateway predicts what the prefix cache holds."""
        raise self._refusal("KV cache events", context)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: _Context
    ) -> common_pb2.FlushCacheResponse:
        """Not offered."""
        raise self._refusal("FlushCache", context)

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: _Context
    ) -> common_pb2.ProfileResponse:
        """Not offered."""
        raise self._refusal("StartProfile", context)

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: _Context
    ) -> common_pb2.ProfileResponse:
        """Not offered."""
        raise self._refusal("StopProfile", context)

    def _refusal(self, what: str, context: _Context) -> ServiceError:
        """The error for what this worker does not offer. Raises ServiceError if the caller may not know."""
        self._callers.check(context)
        return unsupported(what, "Paceline does not offer it through the gateway")

    def _served(self, context: _Context) -> Served:
        """The served model. Raises ServiceError before an executor was ready, or for a caller who may not."""
        self._callers.check(context)
        return self._service.served(GATEWAY)
