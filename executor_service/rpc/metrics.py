"""Prometheus metrics on a port of their own. Counters are read when they are scraped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from service_kit.scrapes import ScrapePort, describe_process

from executor_service.adapters.store import AdapterStore
from executor_service.contract.plan import StepResult
from executor_service.runtime.runtime import Runtime, RuntimeState

_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one executor."""

    def __init__(self, runtime: Runtime) -> None:
        self.registry = CollectorRegistry()
        describe_process(self.registry, "paceline_executor")
        self._step_s = Histogram(
            "paceline_executor_step_seconds",
            "Compute time of a step",
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        self._queue_s = Histogram(
            "paceline_executor_queue_seconds",
            "From a step's arrival to its start",
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        self._rows = Histogram(
            "paceline_executor_step_rows", "Rows of a step", buckets=_ROWS, registry=self.registry
        )
        self._call_errors = Counter(
            "paceline_executor_call_errors",
            "Calls that ended with an error",
            ["method", "reason"],
            registry=self.registry,
        )
        self._tasks = Gauge("paceline_executor_tasks", "Tasks of the event loop", registry=self.registry)
        self.registry.register(_RuntimeCollector(runtime))

    def observe(self, result: StepResult) -> None:
        """Add a step to the histograms."""
        self._step_s.observe(result.compute_us * 1e-6)
        self._queue_s.observe(result.queue_us * 1e-6)
        self._rows.observe(len(result.rows))

    def call_failed(self, method: str, reason: str) -> None:
        """A call of any method got this error."""
        self._call_errors.labels(method, reason).inc()

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes on a thread of their own; returns the bound port. Call it in the event loop.

        Raises OSError.
        """
        loop = asyncio.get_running_loop()
        self._tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        return ScrapePort(make_wsgi_app(self.registry)).open(host, port)


class _RuntimeCollector(Collector):
    """Reads the engine's counters. A scrape may see a step partly counted; the next one is right."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def describe(self) -> list[Metric]:
        """No metrics yet: the model may still be loading."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics except the histograms."""
        runtime = self._runtime
        yield _gauge("serving", "1 while steps are computed", float(runtime.state is RuntimeState.SERVING))
        yield _gauge("queued_steps", "Jobs queued for the device", runtime.worker.queued)
        yield _gauge("step_age_seconds", "Age of the running job", runtime.worker.busy_s)
        loaded = runtime.loaded_or_none
        if loaded is None:
            return
        store, cache, counters = loaded.engine.store, loaded.engine.store.pages, loaded.engine.counters
        pages = GaugeMetricFamily("paceline_executor_kv_pages", "KV pages by state", labels=["state"])
        for state, count in (("free", cache.free), ("cached", cache.cached), ("owned", cache.owned)):
            pages.add_metric([state], count)
        yield pages
        yield _gauge("sequences", "Live caches", store.count)
        yield _gauge("sessions", "Live sessions", len(store.sessions))
        for name, text, value in (
            ("steps", "Steps done", counters.steps),
            (
                "steps_abandoned",
                "Steps cancelled before they began or between two forwards",
                counters.steps_abandoned,
            ),
            ("rows", "Rows done", counters.rows),
            ("tokens_computed", "Tokens fed", counters.tokens_computed),
            ("tokens_sampled", "Tokens sampled", counters.tokens_sampled),
            ("drafts_verified", "Draft tokens verified", counters.drafts_verified),
            ("drafts_accepted", "Draft tokens accepted", counters.drafts_accepted),
            ("compute_seconds", "Time in steps", counters.compute_s),
            ("prefix_hit_tokens", "Prompt tokens found in the prefix cache", cache.hit_tokens),
            ("prefix_query_tokens", "Prompt tokens looked up", cache.query_tokens),
            ("evictions", "Pages taken from the prefix cache", cache.evictions),
            ("page_copies", "Pages copied on write", cache.copies),
            ("sessions_expired", "Sessions whose lease ran out", counters.sessions_expired),
            ("caches_expired", "Caches of session 0 whose lease ran out", counters.caches_expired),
        ):
            yield CounterMetricFamily(f"paceline_executor_{name}", text, value=value)
        yield from _adapter_metrics(store.adapters)
        refused = CounterMetricFamily("paceline_executor_refused", "Refused rows and ops", labels=["reason"])
        for reason, rows in tuple(counters.refused.items()):
            refused.add_metric([reason.value], rows)
        yield refused
        uses = "Live memory: weights, kv, activations of the largest step, overhead, process, on CUDA device"
        memory = GaugeMetricFamily("paceline_executor_memory_bytes", uses, labels=["what"])
        for what, size in runtime.memory().items():
            memory.add_metric([what], size)
        yield memory


def _adapter_metrics(store: AdapterStore) -> Iterator[Metric]:
    registry, slots = store.registry, store.slots
    yield _gauge("adapters", "Loaded adapters", len(registry.names))
    yield _gauge("adapter_bytes", "Memory of the weights of adapters", registry.bytes)
    yield _gauge("adapter_slots", "Slots for adapters", slots.count)
    yield _gauge("adapter_slots_used", "Slots with adapters of live caches", slots.used)
    for name, text, value in (
        ("adapter_loads", "Adapters loaded", registry.loads),
        ("adapter_unloads", "Adapters unloaded", registry.unloads),
        ("adapter_slot_hits", "Openings whose adapter had a slot", slots.hits),
        ("adapter_slot_loads", "Times an adapter was given a slot", slots.loads),
        ("adapter_evictions", "Slots taken from adapters without caches", slots.evictions),
    ):
        yield CounterMetricFamily(f"paceline_executor_{name}", text, value=value)
    rows = CounterMetricFamily("paceline_executor_adapter_rows", "Rows of an adapter", labels=["adapter"])
    tokens = CounterMetricFamily(
        "paceline_executor_adapter_tokens", "Tokens computed with an adapter", labels=["adapter"]
    )
    for name, adapter in tuple(registry.names.items()):
        rows.add_metric([name], adapter.rows)
        tokens.add_metric([name], adapter.tokens)
    yield from (rows, tokens)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"paceline_executor_{name}", text, value=value)
