"""One scheduler's channel and stubs, for the blocking and the asyncio client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.scheduler.v1.admin_pb2_grpc import AdminServiceStub
from paceline.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
"""A HealthCheckResponse whose status is SERVING."""

_Channel = TypeVar("_Channel")
_Scheduler = TypeVar("_Scheduler", bound=SchedulerServiceStub)
_Admin = TypeVar("_Admin", bound=AdminServiceStub)


@dataclass(frozen=True, slots=True)
class SchedulerEndpoint(Generic[_Channel, _Scheduler, _Admin]):
    """One address of a client, and the stubs of its channel. It connects with the first call."""

    address: str
    channel: _Channel
    scheduler: _Scheduler
    admin: _Admin
