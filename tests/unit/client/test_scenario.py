"""The rules by which `tests.scenario` judges outcomes, and its steps."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format
from paceline.scheduler.v1 import scheduler_pb2 as pb

from tests.scenario.__main__ import report
from tests.scenario.matching import differences, sha256
from tests.scenario.stage import (
    BROKEN,
    LIAR,
    LOADING,
    MORTAL,
    MUTE,
    NOBODY,
    PROXIES,
    STRIKES,
    TELLING,
    TLS,
    TOKEN,
    TOLD,
    UNKNOWN,
)
from tests.scenario.steps import MAX_TRIES, SCENARIO, take_again

OUTCOME: dict[str, Any] = {
    "error": {"code": "X", "ms": 100.5, "hint": None, "lost": False},
    "ids": [1, 2],
    "text": "aé",
}
_SERVICES = {*MORTAL, TELLING, TOLD, BROKEN, LOADING, LIAR, NOBODY, MUTE, UNKNOWN, *PROXIES}
_SERVICES |= {"full", "secured"}
_REQUESTS = {"score": pb.ScoreRequest, "embed": pb.EmbedRequest, "rerank": pb.RerankRequest}
_FIELDS = {
    "name", "at", "call", "request", "text", "token_ids", "timeout_ms", "token", "tls", "failover_timeout_ms",
    "parallel", "leave_after_tokens", "abort_after_tokens", "report_after_tokens", *STRIKES, "then", "expect",
    "affinity_key", "in_order", "lands",
}  # fmt: skip


@pytest.mark.parametrize(
    "expected",
    [
        {},
        OUTCOME,
        {"error": {"ms": {"at_least": 100}, "hint": None}},
        {"error": {"ms": {"near": 100.500001}}, "ids": [{"near": 1}, 2]},
        {"text": {"contains": "é"}, "ids": {"sha256": sha256([1, 2])}},
        {"text": {"sha256": "561951c2b8c47984b8b4b8ae1f173a03d9c703f66cf36f145e27bc6145499f74"}},
    ],
)
def test_an_outcome_that_has_what_is_expected_differs_in_nothing(expected: dict[str, Any]) -> None:
    assert list(differences(expected, OUTCOME)) == []


@pytest.mark.parametrize(
    "expected",
    [
        {"left": True},
        {"error": {"code": "Y"}},
        {"error": {"lost": True}},
        {"error": {"lost": 0}},
        {"error": {"ms": {"at_least": 101}}},
        {"error": {"hint": {"at_least": 0}}},
        {"error": {"ms": {"near": 100.51}}},
        {"error": {"hint": {"near": 0}}},
        {"error": {"hint": {"contains": ""}}},
        {"text": {"contains": "b"}},
        {"text": {"sha256": sha256("a")}},
        {"text": {"length": 2}},
        {"ids": [1]},
        {"ids": [1, 3]},
        {"ids": {"sha256": sha256([1])}},
    ],
)
def test_each_difference_is_told_with_its_place(expected: dict[str, Any]) -> None:
    (told,) = differences(expected, OUTCOME)
    assert told.startswith("outcome")


@pytest.mark.parametrize("step", SCENARIO, ids=lambda step: step["name"])
def test_a_step_says_what_runners_and_driver_understand(step: dict[str, Any]) -> None:
    assert set(step) <= _FIELDS
    assert set(step["at"]) <= _SERVICES
    assert step["expect"]
    json_format.ParseDict(step.get("request", {}), _REQUESTS.get(step["call"], pb.GenerateRequest)())
    struck = [step[how] for how in STRIKES if how in step]
    assert bool(struck) == ("report_after_tokens" in step)
    learned = {TOLD} if TELLING in step["at"] else set()
    mortal = {*step["at"], *learned} & {*MORTAL, TELLING, TOLD}
    assert all(set(names) <= mortal for names in struck)
    assert step.get("token") in (None, "wrong", TOKEN)
    assert "tls" not in step or (TLS / step["tls"]).is_file()


class _Services:
    """Stands for a stage at which a strike comes too late for the first `late` tries."""

    continuations = 0

    def __init__(self, late: int) -> None:
        self.late, self.strikes, self.thawed = late, 0, 0

    def address(self, name: str) -> str:
        return name

    def requests(self, name: str) -> int:
        return self.strikes  # one more than before the strike

    def strike(self, how: str, names: list[str]) -> list[str] | None:
        self.strikes += 1
        return None if self.strikes <= self.late else names[1:]

    def thaw(self) -> None:
        self.thawed += 1


class _Runner:
    """Its outcomes for one step, one for each try."""

    def __init__(self, *outcomes: dict[str, Any]) -> None:
        self.outcomes = list(outcomes)

    def run(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"received": 1}, self.outcomes.pop(0)]


_STRUCK = {
    "name": "it dies",
    "at": ["first", "second"],
    "kill": ["first", "second"],
    "expect": {"left": True},
}


@pytest.mark.parametrize("late", range(MAX_TRIES))
def test_a_step_whose_stream_ended_before_the_strike_is_taken_again(late: int) -> None:
    services: Any = _Services(late)
    runner: Any = _Runner(*[{"left": True}] * MAX_TRIES)
    assert take_again(services, runner, _STRUCK) == ({"left": True}, [])
    assert services.strikes == services.thawed == late + 1


def test_a_step_that_never_shows_anything_fails() -> None:
    services: Any = _Services(late=MAX_TRIES)
    runner: Any = _Runner(*[{"left": True}] * MAX_TRIES)
    _, (complaint,) = take_again(services, runner, _STRUCK)
    assert "before its scheduler could be struck" in complaint
    assert services.strikes == MAX_TRIES


@pytest.mark.parametrize(
    ("error", "tries"),
    [({"code": "UNAVAILABLE", "retryable": True}, 2), ({"code": "UNAVAILABLE", "retryable": False}, 1)],
)
def test_only_a_call_that_reached_nobody_is_made_again(error: dict[str, Any], tries: int) -> None:
    services: Any = _Services(late=0)
    runner: Any = _Runner({"error": error}, {"left": True})
    _, complaints = take_again(
        services, runner, {"name": "it leaves", "at": ["first"], "expect": {"left": True}}
    )
    assert bool(complaints) == (tries == 1)
    assert len(runner.outcomes) == 2 - tries


def test_the_report_tells_each_failure_with_its_language_and_ends_with_who_failed() -> None:
    lines = report({"go": ["one", "two"], "ruby": [], "java": ["three"]}).splitlines()
    assert lines == ["go: one", "go: two", "java: three", "3 languages, failed: go, java"]
    assert report({"ruby": []}) == "1 languages, failed: none"
