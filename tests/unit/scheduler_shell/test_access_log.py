"""One line of the log tells of each admitted request, and nothing of what was asked or answered."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.core.evaluation import Evaluation, EvaluationInput
from scheduler_service.errors import ErrorReason
from scheduler_service.streams.evaluation import EvaluationCall
from tests.unit.scheduler_shell.bad_ends import raises
from tests.unit.scheduler_shell.stream_harness import CALLER, LETTERS, MODEL, StreamHarness, read


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "scheduler_service")


def line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The fields of the one line that there is."""
    (record,) = (one for one in caplog.records if one.name.endswith("access_log"))
    assert record.levelname == "INFO"
    fields: dict[str, Any] = record.__dict__["fields"]
    return fields


async def test_a_request_that_finished_has_one_line_with_its_tokens_and_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = StreamHarness()
    stream = harness.admit(max_tokens=2)
    harness.step([LETTERS[0]])
    harness.step([LETTERS[1]])
    await read(stream)
    harness.now = 1.5
    harness.streams.close(stream)
    assert line(caplog) == {
        "method": "Generate",
        "request_id": "r",
        "identity": CALLER.name,
        "model": MODEL.name,
        "prompt_tokens": stream.prompt_tokens,
        "cached_tokens": 0,
        "completion_tokens": 2,
        "reason": "LENGTH",
        "ms": 1500,
    }
    assert stream.prompt_tokens > 0


async def test_a_client_that_leaves_and_an_abort_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    harness = StreamHarness()
    stream = harness.admit(max_tokens=2)
    harness.step([LETTERS[0]])
    harness.streams.close(stream)
    fields = line(caplog)
    assert (fields["reason"], fields["completion_tokens"]) == ("CLIENT_LEFT", 1)
    caplog.clear()
    stream = harness.admit("other", max_tokens=2)
    harness.streams.abort("other", CALLER.name, "aborted")
    with raises(ErrorReason.ABORTED):
        await stream.take()
    harness.streams.close(stream)
    assert line(caplog)["reason"] == "ABORTED"


async def test_an_evaluation_has_a_line_with_the_tokens_of_all_inputs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = StreamHarness()
    call = EvaluationCall("e", 0, b"", b"", method="Score", model=MODEL.name)
    inputs = (EvaluationInput((1, 2, 3), 1), EvaluationInput((1, 2), 1))
    stream = harness.streams.admit_evaluation(call, Evaluation(inputs), 0, CALLER, arrival=0.0, deadline=None)
    harness.streams.close(stream)
    fields = line(caplog)
    assert (fields["method"], fields["prompt_tokens"], fields["reason"]) == ("Score", 5, "CLIENT_LEFT")
