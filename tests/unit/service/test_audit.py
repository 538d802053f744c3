"""Failed calls are counted and logged, and no caller can fill the log with them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from paceline.scheduler.v1 import admin_pb2, scheduler_pb2
from service_kit.audit import MAX_KINDS, Audit

GENERATE = "/paceline.scheduler.v1.SchedulerService/Generate"
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"


class Counted:
    """What an audit has counted."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        contracts = (scheduler_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
        self.audit = Audit(contracts, lambda *call: self.calls.append(call))


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of what was logged since the last look."""
    found = [record.fields | {"level": record.levelname} for record in caplog.records]  # type: ignore[attr-defined]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "service_kit")


async def test_a_failure_is_logged_at_once_and_its_repetitions_in_one_line_per_interval(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted = Counted()
    for _ in range(1000):
        counted.audit.failed("alice", GENERATE, *FULL)
    told = {"identity": "alice", "method": "Generate", "code": FULL[0].name, "reason": FULL[1]}
    assert lines(caplog) == [told | {"count": 1, "level": "INFO"}]
    counted.audit.flush()
    assert lines(caplog) == [told | {"count": 999, "level": "INFO"}]
    counted.audit.failed("alice", GENERATE, *FULL)
    assert lines(caplog) == []  # it goes on: still one line of an interval
    counted.audit.flush()
    assert [line["count"] for line in lines(caplog)] == [1]
    counted.audit.flush()
    assert lines(caplog) == []
    assert counted.audit._flushing is None  # nothing to tell: no timer is left
    counted.audit.failed("alice", GENERATE, *FULL)
    assert [line["count"] for line in lines(caplog)] == [1]
    assert counted.calls == [("Generate", "QUEUE_FULL")] * 1002


async def test_failures_of_thousands_of_callers_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted()
    for number in range(10_000):
        counted.audit.failed(f"10.0.{number // 256}.{number % 256}", GENERATE, *FULL)
    counted.audit.flush()
    told = lines(caplog)
    assert len(told) == MAX_KINDS + 1
    assert sum(line["count"] for line in told) == 10_000
    assert told[-1]["identity"] == "other"


async def test_callers_choose_no_word_of_the_log_and_no_metric_label(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted = Counted()
    for method in ("/x/y", "/paceline.scheduler.v1.SchedulerService/Generate\n2026 ERROR", ""):
        counted.audit.failed("unknown", method, grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert counted.calls == [("other", "UNAUTHENTICATED")] * 3
    assert [(line["method"], line["level"]) for line in lines(caplog)] == [("other", "WARNING")]


async def test_administrators_calls_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted()
    for _ in range(3):
        counted.audit.administered("operator", "AbortRequests")
    counted.audit.flush()
    told = {"identity": "operator", "method": "AbortRequests", "level": "INFO"}
    assert lines(caplog) == [told | {"count": 1}, told | {"count": 2}]
    assert not counted.calls
