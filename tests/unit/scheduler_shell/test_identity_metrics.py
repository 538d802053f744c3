"""Metrics by identity, for a bounded number of identities."""

from __future__ import annotations

from prometheus_client import generate_latest

from scheduler_service.core.config import CoreConfig
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.metrics.metrics import MAX_IDENTITIES, Telemetry
from tests.unit.scheduler.fake_executor import FakeExecutor
from tests.unit.scheduler.harness import CAPACITY, Harness, make_request


def shown(metrics: Telemetry, core: StepScheduler) -> dict[str, float]:
    metrics.show(core.snapshot(), core.shares(MAX_IDENTITIES))
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("paceline_scheduler_"))
    return {name.removeprefix("paceline_scheduler_"): float(value) for name, value in pairs}


def test_each_identity_has_its_requests_refusals_and_tokens() -> None:
    harness, metrics = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=2)), Telemetry()
    harness.add(make_request("a", range(5), identity="alice", max_tokens=4))
    harness.add(make_request("b", range(3), identity="bob", max_tokens=4))
    harness.run()
    values = shown(metrics, harness.core)
    assert values['identity_requests_total{identity="alice"}'] == 1
    assert values['identity_refused_total{identity="alice"}'] == 0
    assert values['identity_tokens_total{identity="alice"}'] == 5 + 2 * 4
    assert values['identity_tokens_total{identity="bob"}'] == 3 + 2 * 4
    assert values['identity_requests_total{identity="other"}'] == 0


def test_the_number_of_identity_labels_is_bounded_and_labels_stay() -> None:
    harness, metrics = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=2)), Telemetry()
    for i in range(3 * MAX_IDENTITIES):
        harness.add(make_request(f"r{i}", identity=f"client {i}"))
    first = shown(metrics, harness.core)
    named = {name for name in first if name.startswith("identity_requests_total")}
    assert len(named) == MAX_IDENTITIES + 1
    assert first['identity_requests_total{identity="other"}'] == 2 * MAX_IDENTITIES
    harness.run()
    assert {name for name in shown(metrics, harness.core) if name in named} == named


def test_predicted_and_actual_waits_are_shown() -> None:
    harness, metrics = Harness(FakeExecutor(CAPACITY), CoreConfig(max_running=1)), Telemetry()
    for i in range(4):
        harness.add(make_request(f"r{i}"))
    harness.run()
    values = shown(metrics, harness.core)
    assert values["wait_s_total"] > 0
    assert "predicted_wait_s_total" in values
