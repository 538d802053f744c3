"""WhyWaiting: of whom a caller may ask, and what the core and the front end know.

An id is asked for in whole, or by CUT and at least MIN_PART characters of its end, or by these of its
beginning and CUT. Ids have ASCII characters only, so none is mistaken for a part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain

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
CUT = "…"
MIN_PART = 8


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
                found = list(self._found(request.request_id, whose, now))
            case "slow":
                if not request.slow:
                    raise invalid("slow", "must be true, or request_id set in its place")
                found = list(self._arriving.slow(whose))
                slow, left_out = self._core.slow(now, MAX_REPORTS, whose)
                return _response([*slow, *found], left_out, now, caller)
            case _:
                raise invalid("which", "request_id or slow must be set")
        return _response(found, 0, now, caller)

    def _found(self, asked: str, whose: str | None, now: float) -> Iterator[WaitReport]:
        """The requests of this id, one of each identity at most; of a part of an id, those that have it."""
        if asked.startswith(CUT) or asked.endswith(CUT):
            named = self._with_part(asked, whose)
        elif whose is not None:
            named = [(whose, check_request_id(asked))]
        else:
            check_request_id(asked)
            named = [(one, asked) for one in {*self._core.identities, *self._arriving.identities}]
        for identity, request_id in named:
            arriving = self._arriving.why(request_id, identity)
            queued = self._core.why(scoped_id(identity, request_id), now)
            if queued is not None and (arriving is None or queued.phase is not Phase.ENDED):
                yield queued
            elif arriving is not None:
                yield arriving

    def _with_part(self, asked: str, whose: str | None) -> list[tuple[str, str]]:
        """The identities and ids of the known requests whose ids end, or begin, so. Looks at each once."""
        fits, part = (str.endswith, asked[1:]) if asked.startswith(CUT) else (str.startswith, asked[:-1])
        if len(part) < MIN_PART:
            raise invalid("request_id", f"must have at least {MIN_PART} characters beside {CUT}")
        check_request_id(part)
        found: dict[str, tuple[str, str]] = {}
        for core_id in chain(self._core.known_ids, self._arriving.known_ids):
            if part in core_id:
                identity, _, request_id = core_id.rpartition(" ")
                if fits(request_id, part) and whose in (None, identity):
                    found[core_id] = identity, request_id
        return list(found.values())


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
