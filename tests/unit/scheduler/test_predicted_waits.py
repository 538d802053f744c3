"""The wait that is predicted for a request at its adding is about the wait that it has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from scheduler_service.core.config import CoreConfig
from scheduler_service.rpc.codec.explanation import explanation
from tests.unit.scheduler.simulation import Call, Simulation, StepCost

STEP_S = 0.05
PLACES = 4


@dataclass
class Callers(Simulation):
    """Steps take STEP_S whatever they compute; a caller's next call comes when one of its has ended."""

    cost: StepCost = field(default_factory=lambda: StepCost(STEP_S, 0.0))
    places: int = PLACES
    config: CoreConfig = field(default_factory=lambda: CoreConfig(max_running=PLACES))
    predicted_s: list[float | None] = field(default_factory=list)  # by call
    once: frozenset[str] = frozenset()  # callers that do not come again

    def follow(self, call: Call) -> Call | None:
        if call.identity in self.once:
            return None
        return Call(at=self.now + 1e-3, length=call.length, identity=call.identity, weight=call.weight)

    def _arrive(self, call: Call) -> None:
        super()._arrive(call)
        report = self.core.why(str(len(self.calls) - 1), self.now)
        assert report is not None
        self.predicted_s.append(report.predicted_wait_s)

    def waits_of(self, identity: str, since: float) -> list[tuple[float | None, float]]:
        """Predicted and real ones of the calls that came then or later, and began."""
        return [
            (predicted_s, call.first_token_s)
            for call, predicted_s in zip(self.calls, self.predicted_s, strict=True)
            if call.identity == identity and call.at >= since and call.first_token_at is not None
        ]


def job(count: int, length: int = 80, **fields: object) -> Iterable[Call]:
    """So many calls at once."""
    return [replace(Call(at=0.0, length=length, identity="nightly"), **fields) for _ in range(count)]  # type: ignore[arg-type]


ALICE = Call(at=0.1, length=10, identity="alice")


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_behind_its_own_requests_a_wait_is_predicted_by_the_places_that_others_leave(weight: float) -> None:
    simulation = Callers()
    simulation.run([*job(60), replace(ALICE, weight=weight)], until=300.0)
    waits = simulation.waits_of("nightly", since=STEP_S)
    assert len(waits) > 100
    for predicted_s, real_s in waits:
        assert predicted_s is not None
        assert real_s / 1.5 <= predicted_s <= real_s * 1.5


def test_short_requests_of_others_count_as_much_as_they_cost() -> None:
    simulation = Callers(once=frozenset({"short"}))
    short = job(60, length=10, at=150.0, identity="short")
    simulation.run([*job(60), replace(ALICE, identity="short"), *short], until=300.0)
    beside = [
        (predicted_s, call.first_token_s)
        for call, predicted_s in zip(simulation.calls, simulation.predicted_s, strict=True)
        if call.identity == "nightly" and 150.0 < call.at < 155.0
    ]
    assert beside
    for predicted_s, real_s in beside:
        assert predicted_s is not None
        assert real_s / 1.25 <= predicted_s <= real_s * 1.25


def test_no_wait_is_predicted_before_anything_has_ended() -> None:
    simulation = Callers()
    simulation.run(job(60), until=STEP_S)
    assert simulation.predicted_s[0] == 0.0
    assert set(simulation.predicted_s[PLACES:]) == {None}


def test_no_wait_is_predicted_before_a_request_of_the_identity_has_ended() -> None:
    simulation = Callers()
    simulation.run([replace(ALICE, at=0.0), *job(60, at=20.0)], until=21.0)
    predicted = [
        predicted_s
        for call, predicted_s in zip(simulation.calls, simulation.predicted_s, strict=True)
        if call.identity == "nightly"
    ]
    assert predicted[0] == 0.0, "a place is free"
    assert set(predicted[8:]) == {None}
    last = max(at for at, call in enumerate(simulation.calls) if call.identity == "nightly")
    report = simulation.core.why(str(last), simulation.now)
    assert report is not None
    assert "(not predicted: too few requests had ended)" in explanation(report, simulation.now)
    slow, _ = simulation.core.slow(simulation.now + 1.0, 1, "nightly")
    assert slow, "after a second it is slow"
