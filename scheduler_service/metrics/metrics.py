"""Prometheus metrics. Gauges and counters of the core are set periodically, not at each event."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from service_kit.scrapes import ScrapePort, describe_process

from scheduler_service.core.events import CompletionUsage
from scheduler_service.core.snapshot import Share, Snapshot
from scheduler_service.core.waiting.reasons import WaitReason
from scheduler_service.errors import ServiceError
from scheduler_service.metrics import vllm_names
from scheduler_service.metrics.adapters import AdapterMetrics
from scheduler_service.metrics.genai import GenAiMetrics

_PREFIX = "paceline_scheduler"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

GAUGES: Mapping[str, str] = {
    "running": "Sequences that hold a cache",
    "waiting": "Sequences that wait for one",
    "waiting_tokens": "Known tokens of the waiting sequences",
    "total_pages": "KV pages of the active executor",
    "free_pages": "KV pages that hold nothing",
    "evictable_pages": "KV pages held by the prefix cache alone",
}
"""Fields of the core's Snapshot that are exported as gauges, with their help texts."""

COUNTERS: Mapping[str, str] = {
    "requests": "Requests taken",
    "refused": "Requests refused by the queue",
    "finished": "Requests that finished",
    "cancelled": "Requests cancelled",
    "failed": "Requests failed",
    "preemptions": "Sequences preempted because pages ran out",
    "executor_losses": "Losses of the active executor",
    "steps": "Steps answered",
    "rows": "Rows answered",
    "prompt_tokens": "Prompt tokens of the requests taken",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "completion_tokens": "Tokens generated",
    "drafted_tokens": "Draft tokens sent",
    "accepted_tokens": "Draft tokens accepted",
    "verifications": "Rows that verified drafts",
    "grammar_drafted_tokens": "Draft tokens sent that a grammar forces",
    "grammar_accepted_tokens": "Draft tokens accepted that a grammar forces",
    "predicted_wait_s": "Seconds that started requests were predicted to be queued",
    "wait_s": "Seconds that started requests were queued",
}
"""Fields of the core's counters that are exported as counters, with their help texts."""

RENAMED: Mapping[str, str] = {
    "predicted_wait_s": "predicted_wait_seconds",
    "wait_s": "wait_seconds",
}
"""Counters whose field's name has an abbreviated unit: exported with it spelled out, and for one more release
as they were."""

MAX_IDENTITIES = 32
"""Identities with metrics of their own: the first ones to be among the most served. Others count as OTHER."""
OTHER = "other"


class Telemetry(Collector):
    """All metrics of one scheduler, in a registry of their own."""

    def __init__(self, *, has_vllm_names: bool = False) -> None:
        """has_vllm_names: some are shown under vLLM's names too."""
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.adapters = AdapterMetrics()
        self.registry.register(self.adapters)
        self.genai = GenAiMetrics(self.registry)
        describe_process(self.registry, _PREFIX)
        self._has_vllm_names = has_vllm_names
        self._adapter_slots = 0
        self._snapshot: Snapshot | None = None
        self.arriving: Callable[[], Mapping[WaitReason, int]] = dict  # not queued yet, by reason
        self._waiting: Mapping[WaitReason, int] = {}
        self._shares: dict[str, Share] = {}  # by label; as of the last `show`
        self.first_token_s = self._histogram("first_token_seconds", "Arrival to first token", _SECONDS)
        self.inter_token_s = Distribution(
            f"{_PREFIX}_inter_token_seconds", "Between deltas of a stream", _SECONDS
        )
        self.token_s = Distribution(
            f"{_PREFIX}_token_seconds",
            "Per token of a stream after its first: time between deltas, divided by the tokens of the second",
            _SECONDS,
        )
        self.registry.register(self.inter_token_s)
        self.registry.register(self.token_s)
        self.step_s = self._histogram("step_seconds", "Step, sent to answered", _SECONDS)
        self.compute_s = self._histogram("step_compute_seconds", "Step, computed by the executor", _SECONDS)
        self.draft_step_s = self._histogram("draft_step_seconds", "Draft step, sent to answered", _SECONDS)
        self.batch_rows = self._histogram("batch_rows", "Rows of a step", _ROWS)
        self.rejections = Counter(
            f"{_PREFIX}_rejections", "Requests ended with an error", ["reason"], registry=self.registry
        )
        self.call_errors = Counter(
            f"{_PREFIX}_call_errors",
            "Calls that ended with an error",
            ["method", "reason"],
            registry=self.registry,
        )
        self.drafted = self._by_position("drafted_by_position", "Drafts of finished completions")
        self.accepted = self._by_position("accepted_by_position", "Accepted drafts of finished completions")
        self.executor_ready = Gauge(
            f"{_PREFIX}_executor_ready", "1: the executor can serve", ["address"], registry=self.registry
        )
        self.degraded = Gauge(
            f"{_PREFIX}_degraded", "1: the queue waits for something that is there", registry=self.registry
        )
        self.tasks = Gauge(f"{_PREFIX}_tasks", "Tasks of the event loop", registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, buckets=buckets, registry=self.registry)

    def _by_position(self, name: str, text: str) -> Counter:
        """Position 1 is the first draft of a verification."""
        return Counter(f"{_PREFIX}_{name}", text, ["position"], registry=self.registry)

    def finished(self, usage: CompletionUsage) -> None:
        """Count the drafts of a completion that has finished."""
        counts = zip(usage.drafted_by_position, usage.accepted_by_position, strict=True)
        for position, (drafted, accepted) in enumerate(counts, start=1):
            self.drafted.labels(position).inc(drafted)
            self.accepted.labels(position).inc(accepted)

    def ended_badly(self, error: ServiceError) -> None:
        """Count a request that ended with an error."""
        self.rejections.labels(error.reason.name).inc()

    def call_failed(self, method: str, reason: str) -> None:
        """Count a call, of any method, that ended with an error."""
        self.call_errors.labels(method, reason).inc()

    def step(self, elapsed_s: float, compute_s: float, rows: int) -> None:
        """Record an answered step."""
        self.step_s.observe(elapsed_s)
        self.compute_s.observe(compute_s)
        self.batch_rows.observe(rows)

    def show(
        self,
        snapshot: Snapshot,
        shares: Sequence[Share],
        waiting: Mapping[WaitReason, int] = MappingProxyType({}),
        *,
        adapter_slots: int = 0,
    ) -> None:
        """Set the core's figures for the next scrapes.

        shares: of the identities served most. waiting: sequences by reason.
        """
        self._snapshot, self._adapter_slots = snapshot, adapter_slots
        self._waiting = {**self.arriving(), **waiting}
        shown = dict(self._shares)
        for share in shares:
            if share.identity in shown or len(shown) < MAX_IDENTITIES:
                shown[share.identity] = share
        self._shares = shown

    def collect(self) -> Iterator[Metric]:
        """The core's figures, for a scrape; called in the metrics server's thread."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=getattr(snapshot, name))
        for name, text in COUNTERS.items():
            value = getattr(snapshot.counters, name)
            if (spelled := RENAMED.get(name)) is not None:
                yield CounterMetricFamily(f"{_PREFIX}_{spelled}", text, value=value)
                text = f"Former name of {_PREFIX}_{spelled}_total"
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=value)
        if self._has_vllm_names:
            yield from self._by_vllm_names(snapshot)
        yield from self._by_reason(snapshot, self._waiting)
        yield from self._by_identity(snapshot, self._shares)

    def _by_vllm_names(self, snapshot: Snapshot) -> Iterator[Metric]:
        model = self.genai.model
        yield from vllm_names.gauges(model, snapshot, self._adapter_slots, self.adapters.rows, time.time())
        for ours in (self.first_token_s, self.inter_token_s):
            yield from vllm_names.histograms(model, ours.collect())

    def _by_reason(self, snapshot: Snapshot, waiting: Mapping[WaitReason, int]) -> Iterator[Metric]:
        """Waits by reason. Every reason has its series from the start, so that rates of it are defined."""
        count = GaugeMetricFamily(
            f"{_PREFIX}_waiting_by_reason",
            "Sequences that wait, and requests that are not queued yet, by reason",
            labels=["reason"],
        )
        waited = CounterMetricFamily(
            f"{_PREFIX}_waited_seconds", "Seconds waited, by reason, when it ended", labels=["reason"]
        )
        seconds = dict(snapshot.waits)
        for reason in WaitReason:
            if reason:
                count.add_metric([reason.name.lower()], waiting.get(reason, 0))
                waited.add_metric([reason.name.lower()], seconds.get(reason, 0.0))
        yield from (count, waited)

    def _by_identity(self, snapshot: Snapshot, shares: Mapping[str, Share]) -> Iterator[Metric]:
        """Metrics by identity. The number of labels is bounded, since clients could choose many names."""
        counters = snapshot.counters
        totals = (
            ("requests", "Requests taken, by identity", counters.requests),
            ("refused", "Requests refused, by identity", counters.refused),
            ("tokens", "Virtual tokens served, by identity: uncached input, and output twice", None),
        )
        for field, text, total in totals:
            family = CounterMetricFamily(f"{_PREFIX}_identity_{field}", text, labels=["identity"])
            for identity, share in shares.items():
                family.add_metric([identity], getattr(share, field))
            if total is not None:
                rest = total - sum(getattr(share, field) for share in shares.values())
                family.add_metric([OTHER], max(0, rest))
            yield family

    def serve(self, host: str, port: int) -> int:
        """Serve the metrics over HTTP in a thread; returns the port. Must be called on the event loop."""
        loop = asyncio.get_running_loop()
        self.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        return ScrapePort(make_wsgi_app(self.registry)).open(host, port)


class Distribution(Collector):
    """A Prometheus histogram; `bounds` are inclusive upper bounds. One thread may add, another collect.

    `prometheus_client.Histogram` takes two locks and a search for each observation: about 1 µs for every
    streamed token.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, value: float, times: int) -> None:
        """Count `times` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """The histogram, for a scrape."""
        labels = map(floatToGoString, self._bounds)
        buckets = list(zip(labels, accumulate(self._counts.copy()), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self._sum)
