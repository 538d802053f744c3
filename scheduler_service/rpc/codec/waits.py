"""Encodes times by reason, and where requests are."""

from __future__ import annotations

from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service.core.wait_report import Phase, WaitReport
from scheduler_service.core.waiting.reasons import WaitReason, WaitTimes
from scheduler_service.rpc.codec.explanation import explanation

_PHASES = {
    Phase.ARRIVING: pb.REQUEST_PHASE_ARRIVING,
    Phase.QUEUED: pb.REQUEST_PHASE_QUEUED,
    Phase.RUNNING: pb.REQUEST_PHASE_RUNNING,
    Phase.PREEMPTED: pb.REQUEST_PHASE_PREEMPTED,
    Phase.ENDED: pb.REQUEST_PHASE_ENDED,
}


def wait_reason(reason: WaitReason) -> pb.WaitReason.ValueType:
    """The contract's number: the same as the core's."""
    number: pb.WaitReason.ValueType = int(reason)  # type: ignore[assignment]  # an enum's number is an int
    return number


def wait_times(times: WaitTimes) -> list[pb.WaitTime]:
    """Times by reason, in microseconds; one of less than half a microsecond is left out."""
    return [
        pb.WaitTime(reason=wait_reason(reason), us=us)
        for reason, seconds in times
        if (us := round(1e6 * seconds))
    ]


def request_wait(report: WaitReport, now: float, *, with_identity: bool) -> pb.RequestWait:
    """Where a request is, and why. `now`: on the report's clock, in seconds."""
    return pb.RequestWait(
        request_id=report.request_id.removeprefix(f"{report.identity} "),
        identity=report.identity if with_identity else "",
        phase=_PHASES[report.phase],
        phase_us=max(0, round(1e6 * (now - report.since))),
        reason=wait_reason(report.reason),
        queue_waits=wait_times(report.queue_waits),
        preempted_waits=wait_times(report.preempted_waits),
        position=report.position,
        first_reason=wait_reason(report.first_reason),
        needed=report.needed,
        available=report.available,
        total=report.total,
        predicted_us=max(0, round(1e6 * (report.predicted_wait_s or 0.0))),
        explanation=explanation(report, now),
        labels=report.labels,
    )
