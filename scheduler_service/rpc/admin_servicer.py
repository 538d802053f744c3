"""Handlers of paceline.scheduler.v1.AdminService, for administrators only."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc.aio
from paceline.scheduler.v1 import admin_pb2 as pb
from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceServicer
from service_kit.audit import Audit
from service_kit.credentials import Credentials

from scheduler_service.core.snapshot import AdapterUse
from scheduler_service.errors import ErrorReason, ServiceError
from scheduler_service.rpc.codec.adapters import check_load, loaded_adapter, loaded_adapters
from scheduler_service.rpc.codec.requests import check_aborts
from scheduler_service.rpc.codec.responses import executor_list
from scheduler_service.service import SchedulerService

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_ONE_MODEL = "this scheduler has one model: only an address of several models loads and unloads them"


class AdminServicer(AdminServiceServicer):
    """Administrators' RPCs. Each handler first raises ServiceError if the caller is no administrator."""

    def __init__(self, service: SchedulerService, credentials: Credentials, audit: Audit) -> None:
        self._service, self._credentials, self._audit = service, credentials, audit

    async def ListExecutors(
        self, request: pb.ListExecutorsRequest, context: _Context
    ) -> pb.ListExecutorsResponse:
        """All executors with their state; answered in every state of the service."""
        self._check(context, "ListExecutors")
        return executor_list(self._service.executors)

    async def AbortRequests(
        self, request: pb.AbortRequestsRequest, context: _Context
    ) -> pb.AbortRequestsResponse:
        """End requests by id: those of one identity, or of all identities if none is named."""
        self._check(context, "AbortRequests")
        check_aborts(request.request_ids)
        streams, why = self._service.streams, "aborted by an operator"
        response = pb.AbortRequestsResponse()
        for request_id in request.request_ids:
            if request.identity:
                aborted = streams.abort(request_id, request.identity, why)
            else:
                aborted = streams.abort_all(request_id, why)
            (response.aborted if aborted else response.unknown).append(request_id)
        return response

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: _Context) -> pb.LoadAdapterResponse:
        """Load an adapter on all executors; requests may name it then."""
        self._check(context, "LoadAdapter")
        service = self._service
        model = service.served(self._credentials.identify(context)).model
        adapter = await service.adapters.load(*check_load(request, model))
        requests, uses = service.wanted.requests[adapter.name], service.core.adapter_use()
        use = uses.get(adapter.fingerprint, AdapterUse())
        return pb.LoadAdapterResponse(adapter=loaded_adapter(adapter, requests, use))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: _Context
    ) -> pb.UnloadAdapterResponse:
        """Let no further request name an adapter; unload it when those that use it have ended."""
        self._check(context, "UnloadAdapter")
        return pb.UnloadAdapterResponse(unloaded=await self._service.adapters.unload(request.name))

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: _Context
    ) -> pb.ListAdaptersResponse:
        """The adapters that requests may name, and what uses them."""
        self._check(context, "ListAdapters")
        wanted = self._service.wanted
        return loaded_adapters(wanted.served, wanted.requests, self._service.core.adapter_use())

    async def LoadModel(self, request: pb.LoadModelRequest, context: _Context) -> pb.LoadModelResponse:
        """Refuse it: a scheduler has its one model."""
        self._check(context, "LoadModel")
        raise ServiceError(ErrorReason.UNSUPPORTED, _ONE_MODEL)

    async def UnloadModel(self, request: pb.UnloadModelRequest, context: _Context) -> pb.UnloadModelResponse:
        """Refuse it: a scheduler has its one model."""
        self._check(context, "UnloadModel")
        raise ServiceError(ErrorReason.UNSUPPORTED, _ONE_MODEL)

    def _check(self, context: _Context, method: str) -> None:
        caller = self._credentials.identify(context)
        if not caller.admin:
            raise ServiceError(ErrorReason.PERMISSION, f"{caller.name} is no administrator of this scheduler")
        self._audit.administered(caller.name, method)
