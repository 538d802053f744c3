"""Acceptance estimates: where they start, what they learn, what they forget."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.speculation.acceptance_rates import Acceptance, Population
from scheduler_service.core.speculation.drafters import (
    ExecutorDrafter,
    executor_population,
    ngram_populations,
)


def test_a_new_sequence_starts_from_what_the_others_saw() -> None:
    population = executor_population()
    prior = Acceptance(population).rate()
    others = [Acceptance(population) for _ in range(10)]
    for _ in range(20):
        for other in others:
            other.learn(0, missed=True)
    assert prior == pytest.approx(0.7)
    assert Acceptance(population).rate() < 0.1


def test_a_sequence_soon_has_its_own_view() -> None:
    population = executor_population()
    good, bad = Acceptance(population), Acceptance(population)
    for _ in range(12):
        good.learn(1, missed=False)
        bad.learn(0, missed=True)
    assert good.rate() > 0.85
    assert bad.rate() < 0.2


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("drafted", [1, 4, 8])
def test_the_estimate_is_the_rate_whatever_the_length(alpha: float, drafted: int) -> None:
    rng = random.Random(1)
    drafter = ExecutorDrafter(executor_population())
    estimates = []
    for _ in range(4000):
        accepted = 0
        while accepted < drafted and rng.random() < alpha:
            accepted += 1
        drafter.verified(drafted, accepted)
        candidate = drafter.candidate(drafted)
        assert candidate is not None
        estimates.append(candidate.first)
    assert sum(estimates[500:]) / 3500 == pytest.approx(alpha, abs=0.03)


def test_what_was_long_ago_is_forgotten() -> None:
    acceptance = Acceptance(executor_population())
    for _ in range(2000):
        acceptance.learn(1, missed=False)
    for _ in range(60):
        acceptance.learn(0, missed=True)
    assert acceptance.rate() < 0.35


def test_longer_matches_are_trusted_more_at_first() -> None:
    rates = [Acceptance(population).rate() for population in ngram_populations()]
    assert rates == sorted(rates)
    assert len(set(rates)) == len(rates)


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=50))
def test_a_rate_is_a_probability(learned: list[tuple[int, bool]]) -> None:
    population = Population(0.5)
    acceptance = Acceptance(population)
    for hits, missed in learned:
        acceptance.learn(hits, missed=missed)
    assert 0 <= acceptance.rate() <= 1
    assert 0 <= Acceptance(population).rate() <= 1


def test_no_room_is_no_candidate() -> None:
    assert ExecutorDrafter(executor_population()).candidate(0) is None
