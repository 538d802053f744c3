"""paceline.scheduler.v1.AdminService as handlers: what clients have no business with."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc.aio
from paceline.scheduler.v1 import admin_pb2 as pb
from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceServicer

from scheduler_service.codec.requests import check_aborts
from scheduler_service.codec.responses import executor_list
from scheduler_service.errors import Aborted
from scheduler_service.service import SchedulerService

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AdminServicer(AdminServiceServicer):
    """The operator's view of a scheduler."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service

    async def ListExecutors(
        self, request: pb.ListExecutorsRequest, context: _Context
    ) -> pb.ListExecutorsResponse:
        """Answered in every state."""
        return executor_list(self._service.executors)

    async def AbortRequests(
        self, request: pb.AbortRequestsRequest, context: _Context
    ) -> pb.AbortRequestsResponse:
        """Ends what is live, whoever's it is."""
        check_aborts(request.request_ids)
        response = pb.AbortRequestsResponse()
        for request_id in request.request_ids:
            aborted = self._service.live.cancel(request_id, Aborted("aborted by an operator"))
            (response.aborted if aborted else response.unknown).append(request_id)
        return response
