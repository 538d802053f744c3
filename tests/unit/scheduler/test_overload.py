"""Offered more than can be done, what is done stays done in time: goodput on the virtual clock.

Goodput is the number of requests a second that end by their deadlines. Load is open loop: clients send on,
whatever becomes of their requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from scheduler_service.core.config import CoreConfig
from tests.unit.scheduler.simulation import Call, Simulation, StepCost, poisson, quantile

pytestmark = pytest.mark.long

WARM_UP_S = 8.0
PLACES = 64
LENGTH, PROMPT = 20, 16

FLAT, FLAT_END_S = StepCost(0.02, 2e-4), 20.0  # rows cost next to nothing: all places can be taken
STEEP, STEEP_END_S = (
    StepCost(0.01, 2e-3),
    40.0,
)  # they cost so much that with all places taken nobody would end in 2 s


def capacity(cost: StepCost, deadline_s: float | None) -> float:
    """Requests a second with as many rows as leave each a fifth of its time for the queue."""
    rows = PLACES
    while (took_s := LENGTH * cost.seconds(rows + rows * PROMPT // LENGTH)) > 0.8 * (deadline_s or 1e9):
        rows -= 1
    return rows / took_s


def end_s(cost: StepCost) -> float:
    """Until when load is offered: a few hundred requests, whatever a step costs."""
    return FLAT_END_S if cost is FLAT else STEEP_END_S


def offered(cost: StepCost, load: float, deadline_s: float | None, spread: float) -> list[Call]:
    rng = random.Random(5)
    rate = load * capacity(cost, deadline_s)
    calls = list(poisson(rate, end_s(cost), 3, length=0, prompt=PROMPT, timeout_s=deadline_s))
    for call in calls:
        call.length = max(1, round(LENGTH * rng.lognormvariate(0, spread)))
    return calls


def run(cost: StepCost, load: float, deadline_s: float | None, spread: float = 0.2) -> list[Call]:
    calls = offered(cost, load, deadline_s, spread)
    simulation = Simulation(cost, places=PLACES, config=CoreConfig(max_running=PLACES))
    simulation.run(calls, until=end_s(cost))
    return calls


def goodput(cost: StepCost, calls: Iterable[Call]) -> float:
    done = [call for call in calls if call.finished_at is not None and call.finished_at > WARM_UP_S]
    return len(done) / (end_s(cost) - WARM_UP_S)


@pytest.mark.parametrize(
    ("cost", "loads", "deadline_s"),
    [
        pytest.param(FLAT, (1, 5), 2.0, id="flat"),
        pytest.param(STEEP, (1, 5), 5.0, id="steep"),
        pytest.param(FLAT, (1, 5), 5.0, id="flat, patient", marks=pytest.mark.slow),
        pytest.param(STEEP, (1, 2, 5), 2.0, id="steep, impatient", marks=pytest.mark.slow),
    ],
)
def test_goodput_stays_at_its_peak_however_much_is_offered(
    cost: StepCost, loads: tuple[int, ...], deadline_s: float
) -> None:
    by_load = {load: goodput(cost, run(cost, load, deadline_s)) for load in loads}
    best = max(by_load.values())
    assert all(by_load[load] >= 0.9 * best for load in loads[1:]), by_load
    assert by_load[1] >= 0.85 * capacity(cost, deadline_s), by_load


def burst(count: int, running: int = 0) -> list[Call]:
    """So many calls at once, due in 2 s, on an executor with 32 places that has served some before."""
    simulation = Simulation(FLAT, places=32, config=CoreConfig(max_running=32))
    simulation.run([Call(at=0.01 * i, length=LENGTH, timeout_s=10.0) for i in range(200)])
    at = simulation.now + 5.0
    calls = [Call(at=at, length=LENGTH, timeout_s=2.0) for _ in range(count)]
    simulation.run([*(Call(at=at - 0.1, length=LENGTH) for _ in range(running)), *calls])
    return calls


@pytest.mark.parametrize("running", [0, 4])
def test_of_a_burst_on_free_places_as_many_are_taken_as_can_be_done_in_time(running: int) -> None:
    assert not any(call.refused for call in burst(32 - running, running))
    calls = burst(1000, running)
    taken = [call for call in calls if call.refused is None]
    assert 32 < len(taken) < 130  # in 2 s there are three rounds on 32 places
    assert sum(call.finished_at is not None for call in taken) >= 0.9 * len(taken)


def test_hardly_anything_is_computed_in_vain() -> None:
    calls = run(STEEP, 5, 2.0)
    begun = [
        call for call in calls if call.first_token_at is not None and WARM_UP_S < call.at < STEEP_END_S - 2
    ]
    assert sum(call.finished_at is not None for call in begun) >= 0.85 * len(begun)


def test_refusals_say_how_long_the_wait_is() -> None:
    calls = run(FLAT, 5, 5.0)
    waits = [call.first_token_s for call in calls if call.first_token_at is not None]
    told = [call.refused.retry_after_s for call in calls if call.refused is not None]
    assert len(told) > 1000
    assert 0.5 <= quantile(told, 0.5) / quantile(waits, 0.5) <= 2.0


def test_without_deadlines_the_bounded_queue_is_used_and_nobody_is_refused_before_it_is_full() -> None:
    calls = offered(FLAT, 5, None, 0.2)
    config = CoreConfig(max_running=PLACES, max_queued_requests=200)
    simulation = Simulation(FLAT, places=PLACES, config=config)
    simulation.run(calls, until=FLAT_END_S)
    assert simulation.core.snapshot().waiting > 190
    assert goodput(FLAT, calls) >= 0.85 * capacity(FLAT, None)
