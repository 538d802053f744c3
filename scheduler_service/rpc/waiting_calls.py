"""WhyWaiting: of whom a caller may ask, and what the core and the front end know."""

from __future__ import annotations

import time
from collections.abc import Iterator

from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.identity import Identity

from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.wait_report import Phase, WaitReport
from scheduler_service.errors import ErrorReason, ServiceError, invalid
from scheduler_service.rpc.arriving import ArrivingCalls
from scheduler_service.rpc.codec.requests import check_request_id
from scheduler_service.rpc.codec.waits import request_wait
from scheduler_service.streams.request import scoped_id

MAX_REPORTS = 256
"""Requests of one reply."""


class WaitingCalls:
    """Answers WhyWaiting."""

    def __init__(self, core: StepScheduler, arriving: ArrivingCalls) -> None:
        self._core, self._arriving = core, arriving

    def answer(self, request: pb.WhyWaitingRequest, caller: Identity) -> pb.WhyWaitingResponse:
        """Requests of the caller's identity, or, for administrators, of another or of all.

        Raises ServiceError. An id that is not known gets no entry, as one of another identity.
        """
        whose = _whose(request, caller)
        now = time.monotonic()
        match request.WhichOneof("which"):
            case "request_id":
                if not request.request_id:
                    raise invalid("request_id", "is empty")
                found = list(self._by_id(check_request_id(request.request_id), whose, now))
            case "slow":
                if not request.slow:
                    raise invalid("slow", "must be true, or request_id set in its place")
                found = list(self._arriving.slow(whose))
                slow, left_out = self._core.slow(now, MAX_REPORTS, whose)
                return _response([*slow, *found], left_out, now, caller)
            case _:
                raise invalid("which", "request_id or slow must be set")
        return _response(found, 0, now, caller)

    def _by_id(self, request_id: str, whose: str | None, now: float) -> Iterator[WaitReport]:
        """The requests of this id: one of each identity at most."""
        identities = [whose] if whose is not None else {*self._core.identities, *self._arriving.identities}
        for identity in identities:
            arriving = self._arriving.why(request_id, identity)
            queued = self._core.why(scoped_id(identity, request_id), now)
            if queued is not None and (arriving is None or queued.phase is not Phase.ENDED):
                yield queued
            elif arriving is not None:
                yield arriving


def _whose(request: pb.WhyWaitingRequest, caller: Identity) -> str | None:
    """The identity whose requests are asked for; None: everybody's."""
    if request.identity and request.all_identities:
        raise invalid("identity", "not with all_identities")
    others = request.all_identities or request.identity not in ("", caller.name)
    if others and not caller.admin:
        field = "all_identities" if request.all_identities else "identity"
        raise ServiceError(ErrorReason.PERMISSION, f"{field}: {caller.name} is no administrator")
    return None if request.all_identities else request.identity or caller.name


def _response(
    reports: list[WaitReport], left_out: int, now: float, caller: Identity
) -> pb.WhyWaitingResponse:
    shown = reports[:MAX_REPORTS]
    return pb.WhyWaitingResponse(
        requests=[request_wait(one, now, with_identity=caller.admin) for one in shown],
        left_out=left_out + len(reports) - len(shown),
    )
