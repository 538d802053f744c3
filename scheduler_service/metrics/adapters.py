"""Prometheus metrics of adapters, with a bounded number of labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_service.core.snapshot import AdapterUse
from scheduler_service.metrics.vllm_names import AdapterRow
from scheduler_service.model import ServedAdapter

MAX_ADAPTERS = 32
"""Adapters with metrics of their own: the first ones by name. Others count as OTHER."""
OTHER = "other"
_PREFIX = "paceline_scheduler"
_NO_USE = AdapterUse()


class AdapterMetrics(Collector):
    """The figures of the last `show`."""

    def __init__(self) -> None:
        self._loads = self._unloads = self._served = 0
        self.rows: tuple[AdapterRow, ...] = ()
        """By label, MAX_ADAPTERS at most and those of the others together."""

    def show(
        self,
        served: Sequence[ServedAdapter],
        requests: Mapping[str, int],
        uses: Mapping[bytes, AdapterUse],
        loads: int,
        unloads: int,
    ) -> None:
        """Set the figures for the next scrapes: requests by name, sequences by fingerprint, and totals."""
        rows = [
            (one.name, requests[one.name], use.running, use.waiting)
            for one in served
            for use in (uses.get(one.fingerprint, _NO_USE),)
        ]
        if len(rows) > MAX_ADAPTERS:
            rest = rows[MAX_ADAPTERS:]
            others = (sum(row[1] for row in rest), sum(row[2] for row in rest), sum(row[3] for row in rest))
            rows = [*rows[:MAX_ADAPTERS], (OTHER, *others)]
        self.rows = tuple(rows)
        self._served, self._loads, self._unloads = len(served), loads, unloads

    def collect(self) -> Iterator[Metric]:
        """The figures, for a scrape; called in the metrics server's thread."""
        yield GaugeMetricFamily(f"{_PREFIX}_adapters", "Adapters that requests may name", value=self._served)
        yield CounterMetricFamily(f"{_PREFIX}_adapter_loads", "Adapters loaded", value=self._loads)
        yield CounterMetricFamily(f"{_PREFIX}_adapter_unloads", "Adapters unloaded", value=self._unloads)
        requests = CounterMetricFamily(
            f"{_PREFIX}_adapter_requests", "Requests taken, by adapter", labels=["adapter"]
        )
        running = GaugeMetricFamily(
            f"{_PREFIX}_adapter_running", "Sequences that hold a cache, by adapter", labels=["adapter"]
        )
        waiting = GaugeMetricFamily(
            f"{_PREFIX}_adapter_waiting", "Sequences that wait for one, by adapter", labels=["adapter"]
        )
        for name, taken, holding, queued in self.rows:
            requests.add_metric([name], taken)
            running.add_metric([name], holding)
            waiting.add_metric([name], queued)
        yield from (requests, running, waiting)
