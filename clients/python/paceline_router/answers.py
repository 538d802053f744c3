"""What the router answers by itself: which models there are, and calls that concern all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import grpc
import grpc.aio
from paceline.scheduler.v1 import admin_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.audit import Audit
from service_kit.credentials import Credentials

from paceline_router.calls import Own, RoutedCalls, refusal, try_again
from paceline_router.models import ModelState, RoutedModel, RoutedModels
from paceline_router.supervisor_connection import SupervisorConnection

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SUPERVISOR = "serve"
"""Who has written the entries: not a scheduler, so that clients take none for that of the scheduler asked."""
MAX_WATCHERS = 2048
_STATES = {
    ModelState.AVAILABLE: pb.SCHEDULER_STATE_AVAILABLE,
    ModelState.LOADING: pb.SCHEDULER_STATE_LOADING,
    ModelState.SERVING: pb.SCHEDULER_STATE_SERVING,
    ModelState.DRAINING: pb.SCHEDULER_STATE_DRAINING,
    ModelState.FAILED: pb.SCHEDULER_STATE_FAILED,
}
_SCHEDULER, _ADMIN = "/paceline.scheduler.v1.SchedulerService/", "/paceline.scheduler.v1.AdminService/"


class RouterAnswers:
    """The handlers. `methods`: by path."""

    def __init__(self, supervisor: SupervisorConnection, credentials: Credentials, audit: Audit) -> None:
        self._supervisor, self._credentials, self._audit, self._watchers = supervisor, credentials, audit, 0
        self.calls: RoutedCalls
        self.methods: Mapping[str, Own] = {
            f"{_SCHEDULER}WatchSchedulers": self._watch,
            f"{_SCHEDULER}Abort": self._abort,
            f"{_ADMIN}AbortRequests": self._abort,
            f"{_ADMIN}LoadModel": self._load,
            f"{_ADMIN}UnloadModel": self._unload,
        }

    async def _watch(self, request: pb.WatchSchedulersRequest, context: _Context) -> None:
        """The models, as entries without an address: they are reached by this one. Then each change."""
        if self._watchers >= MAX_WATCHERS:
            text = "too many calls watch the models"
            raise try_again(text, "WATCHERS", grpc.StatusCode.RESOURCE_EXHAUSTED)
        self._watchers += 1
        try:
            await self._tell(request, context)
        finally:
            self._watchers -= 1

    async def _tell(self, request: pb.WatchSchedulersRequest, context: _Context) -> None:
        """Write all models, then those that change, until cancelled; none if `own` is asked for."""
        known: RoutedModels | None = None
        while True:
            models = self._supervisor.models
            changed = [] if request.own else [one for one in models if known is None or one not in known]
            if changed or known is None:
                answer = pb.WatchSchedulersResponse(entries=map(_entry, changed), complete=known is None)
                await context.write(answer.SerializeToString())
            known = models
            while self._supervisor.models is models:  # they may have changed while this was written
                await self._supervisor.changed()

    async def _abort(self, request: Any, context: _Context) -> None:
        """End requests of whichever model has them: of Abort and AbortRequests alike."""
        method = f"{_SCHEDULER}Abort" if isinstance(request, pb.AbortRequest) else f"{_ADMIN}AbortRequests"
        aborted = set()
        for data in await self.calls.all(method, request.SerializeToString(), context):
            aborted |= set(pb.AbortResponse.FromString(data).aborted)  # both have the same fields
        unknown = [one for one in request.request_ids if one not in aborted]
        await context.write(pb.AbortResponse(aborted=sorted(aborted), unknown=unknown).SerializeToString())

    async def _load(self, request: admin_pb2.LoadModelRequest, context: _Context) -> None:
        await self.calls.up(self._administered(request.model, "LoadModel", context), context)
        await context.write(admin_pb2.LoadModelResponse().SerializeToString())

    async def _unload(self, request: admin_pb2.UnloadModelRequest, context: _Context) -> None:
        unloaded = await self._supervisor.put_away(self._administered(request.model, "UnloadModel", context))
        if self._supervisor.closing:
            raise try_again("shutting down", "DRAINING")
        await context.write(admin_pb2.UnloadModelResponse(unloaded=unloaded).SerializeToString())

    def refused(self, context: _Context, method: str, code: grpc.StatusCode, reason: str) -> None:
        """Record a call that was refused here."""
        self._audit.failed(self._credentials.identify(context).name, method, code, reason)

    def _administered(self, name: str, method: str, context: _Context) -> str:
        """The name of the model that an administrator means. Raises CallEndError, UnknownModelError."""
        caller = self._credentials.identify(context)
        if not caller.admin:
            text = f"{caller.name} is no administrator"
            raise refusal(text, "PERMISSION", grpc.StatusCode.PERMISSION_DENIED)
        self._audit.administered(caller.name, method)
        return self._supervisor.models.meant(name, "").name


def _entry(model: RoutedModel) -> pb.SchedulerEntry:
    return pb.SchedulerEntry(
        model=model.name,
        state=_STATES[model.state],
        detail=model.detail,
        memory_bytes=model.memory_bytes,
        adapters=model.adapters,
        written_by=SUPERVISOR,
        generation=time.time_ns() // 1_000_000,
    )
