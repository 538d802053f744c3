"""Verdicts of `paceline doctor` that no test server has to be started for."""

from __future__ import annotations

from typing import Any, cast

import grpc
import pytest
from paceline import errors
from paceline.cli.diagnosis import Verdict, _verdict_on_silence


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (errors.from_code(grpc.StatusCode.PERMISSION_DENIED.value[0], "not yours"), Verdict.SLOW),
        (errors.from_code(grpc.StatusCode.DEADLINE_EXCEEDED.value[0], "late"), Verdict.FROZEN),
    ],
    ids=["the status is denied", "no status"],
)
def test_a_service_that_denies_its_status_is_not_called_frozen(
    error: errors.PacelineError, verdict: Verdict
) -> None:
    class Unanswering:
        def status(self, *, timeout_s: float) -> Any:
            raise error

    assert _verdict_on_silence(cast(Any, Unanswering()), 1.0) is verdict
