"""Encodes parts of the step log for one caller."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from paceline.scheduler.v1 import scheduler_pb2 as pb
from service_kit.identity import Identity

from scheduler_service.core.step_log import COLUMNS, FAILURES, Events, StepEvent, StepPart
from scheduler_service.errors import reason_of
from scheduler_service.rpc.statuses import CODES

_FAILURE_CODES = [CODES[reason_of(failure)].value[0] for failure in FAILURES]
"""The google.rpc.Code with which a request ends, by the value of an event REFUSED."""


def step_log(part: StepPart, lost: int, caller: Identity, since_1970_s: float) -> pb.WatchStepsResponse:
    """The part without names of others' requests, unless the caller is an administrator.

    lost: steps before it that the caller did not get. since_1970_s: what the part's clock lacks to that time.
    """
    starts = part.columns[0]
    columns = dict(zip(COLUMNS, part.columns, strict=True))
    columns["started_us"] = [0, *(later - start for start, later in pairwise(starts))]
    log = pb.StepLog(
        first_step=part.first_step,
        lost_steps=lost,
        started_at_us=round(1e6 * (part.started_at + since_1970_s)),
        event_kinds=cast("Sequence[pb.StepEventKind.ValueType]", part.events.kinds),
        event_requests=part.events.requests,
        event_indexes=part.events.indexes,
        event_values=_values(part.events),
        names=[
            pb.RequestName(
                number=number,
                request_id=request_id.removeprefix(f"{identity} "),
                identity=identity if caller.admin else "",
            )
            for number, (request_id, identity) in part.names.items()
            if caller.admin or identity == caller.name
        ],
    )
    for name, column in columns.items():
        getattr(log, name).extend(column)
    return pb.WatchStepsResponse(log=log)


def _values(events: Events) -> list[int]:
    return [
        _FAILURE_CODES[value] if kind == StepEvent.REFUSED else value
        for kind, value in zip(events.kinds, events.values, strict=True)
    ]
