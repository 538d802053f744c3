"""Every refusal and failure has one status, with the details that the public contract promises."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from paceline.scheduler.v1 import scheduler_pb2 as pb

from scheduler_service import errors
from scheduler_service.core import errors as core_errors
from scheduler_service.core.events import Failed, Failure
from scheduler_service.rpc.statuses import CODES, status_of

REASONS = {name.removeprefix("ERROR_REASON_") for name in pb.ErrorReason.keys()}  # noqa: SIM118
RETRYABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}

ADMISSION = [
    (core_errors.NeverFits("max_tokens", "too long"), grpc.StatusCode.INVALID_ARGUMENT),
    (core_errors.IdInUse("live"), grpc.StatusCode.ALREADY_EXISTS),
    (core_errors.NoRoom("full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (core_errors.QuotaUsed("yours", 1.5, "bob"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (core_errors.TooLate("late", 1.5, "bob"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (core_errors.NotReady("none"), grpc.StatusCode.UNAVAILABLE),
]


def details(error: errors.ServiceError) -> tuple[error_details_pb2.ErrorInfo, float | None]:
    metadata = dict(status_of(error).trailing_metadata)
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert info.reason in REASONS
    delay = None
    for detail in status.details[1:]:
        if detail.Unpack(retry):
            delay = retry.retry_delay.ToTimedelta().total_seconds()
    return info, delay


@pytest.mark.parametrize(("error", "code"), ADMISSION)
def test_every_refusal_of_the_core_has_its_status(
    error: core_errors.AdmissionError, code: grpc.StatusCode
) -> None:
    mapped = errors.of_admission(error)
    assert CODES[mapped.reason] is code
    info, delay = details(mapped)
    assert info.domain == "paceline"
    assert info.reason == mapped.reason.name
    assert (delay is not None) == (code in RETRYABLE)


def test_a_refusal_names_identity_limit_and_retry_time() -> None:
    error = core_errors.QuotaUsed("bob: 5 requests are queued", 1.5, "bob", "queued requests")
    info, delay = details(errors.of_admission(error))
    assert (info.reason, dict(info.metadata)) == ("QUOTA", {"identity": "bob", "limit": "queued requests"})
    assert delay == 1.5


def test_no_refusal_of_the_core_was_forgotten() -> None:
    kinds = {kind for _, kind in inspect.getmembers(core_errors, inspect.isclass)}
    admission = {kind for kind in kinds if issubclass(kind, core_errors.AdmissionError)}
    assert admission - {core_errors.AdmissionError} == {type(error) for error, _ in ADMISSION}


@pytest.mark.parametrize("failure", list(Failure))
@pytest.mark.parametrize("emitted", [False, True])
def test_every_failure_has_its_status_and_none_is_retryable_after_tokens(
    failure: Failure, emitted: bool
) -> None:
    mapped = errors.of_failure(Failed("r", failure, "why", emitted))
    info, delay = details(mapped)
    assert mapped.message == ("grammar: why" if failure is Failure.GRAMMAR else "why")
    assert dict(info.metadata) == ({"field": "grammar"} if failure is Failure.GRAMMAR else {})
    assert (delay is not None) == (CODES[mapped.reason] in RETRYABLE and not emitted)


def test_every_reason_is_one_of_the_contract_and_has_the_code_that_it_names() -> None:
    proto = Path(__file__).parents[3] / "protos/paceline/scheduler/v1/scheduler.proto"
    told = dict(re.findall(r"ERROR_REASON_(\w+) = \d+; // ([A-Z_]+)", proto.read_text()))
    assert {reason.name for reason in errors.ErrorReason} <= REASONS
    assert {reason.name: CODES[reason].name for reason in errors.ErrorReason}.items() <= told.items()


def test_a_refused_field_is_in_the_details() -> None:
    refused = errors.invalid("stop.strings[3]", "must not be empty")
    info, _ = details(refused)
    assert dict(info.metadata) == {"field": "stop.strings[3]"}
    metadata = dict(status_of(refused).trailing_metadata)
    bad = error_details_pb2.BadRequest()
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert any(detail.Unpack(bad) for detail in status.details)
    assert [violation.field for violation in bad.field_violations] == ["stop.strings[3]"]
