"""Handlers of paceline.scheduler.v1.AdminService, for administrators only."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc.aio
from paceline.scheduler.v1 import admin_pb2 as pb
from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceServicer
from paceline.service.audit import Audit
from paceline.service.credentials import Credentials

from scheduler_service.errors import ErrorReason, ServiceError, not_served
from scheduler_service.rpc.codec.requests import check_aborts
from scheduler_service.rpc.codec.responses import executor_list
from scheduler_service.service import SchedulerService

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


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
        """Refused: CAPABILITY_ADAPTERS is not advertised; likewise the next two."""
        self._check(context, "LoadAdapter")
        raise not_served("LoadAdapter")

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: _Context
    ) -> pb.UnloadAdapterResponse:
        """Refused."""
        self._check(context, "UnloadAdapter")
        raise not_served("UnloadAdapter")

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: _Context
    ) -> pb.ListAdaptersResponse:
        """Refused."""
        self._check(context, "ListAdapters")
        raise not_served("ListAdapters")

    def _check(self, context: _Context, method: str) -> None:
        caller = self._credentials.identify(context)
        if not caller.admin:
            raise ServiceError(ErrorReason.PERMISSION, f"{caller.name} is no administrator of this scheduler")
        self._audit.administered(caller.name, method)
