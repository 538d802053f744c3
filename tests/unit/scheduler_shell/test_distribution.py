"""Observations that are added many at once are shown as if each had been observed by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from scheduler_service.metrics.metrics import Distribution

BOUNDS = (0.25, 0.5, 1, 30)
VALUES = st.integers(0, 200).map(lambda quarters: quarters / 4)  # also the bounds; sums are exact


@given(st.lists(st.tuples(VALUES, st.integers(1, 5)), max_size=20))
def test_a_distribution_is_scraped_as_a_prometheus_histogram(seen: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    distribution = Distribution("pauses_seconds", "Between two", BOUNDS)
    ours.register(distribution)
    histogram = Histogram("pauses_seconds", "Between two", buckets=BOUNDS, registry=theirs)
    for value, times in seen:
        distribution.add(value, times)
        for _ in range(times):
            histogram.observe(value)
    shown = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == shown
