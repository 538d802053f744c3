"""Some metrics a second time, under vLLM's names, for boards and routers that are made for it.

Only those whose meaning is the same. Sources: vLLM's documentation of its metrics ("Production Metrics"), and
the model server protocol of Kubernetes' gateway-api-inference-extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from scheduler_service.core.snapshot import Snapshot

AdapterRow = tuple[str, int, int, int]
"""Of an adapter: its name, requests taken, running and waiting sequences."""


def gauges(
    model: str, snapshot: Snapshot, slots: int, rows: Sequence[AdapterRow], now: float
) -> Iterator[Metric]:
    """What is live. slots: for adapters; 0: there are none. now: seconds since 1970."""
    total = snapshot.total_pages
    unused = snapshot.free_pages + snapshot.evictable_pages
    labels = {"model_name": model}
    yield _gauge("num_requests_running", "Sequences that hold a cache", labels, snapshot.running)
    yield _gauge("num_requests_waiting", "Sequences that wait for one", labels, snapshot.waiting)
    used = 1 - unused / total if total else 0.0
    yield _gauge("kv_cache_usage_perc", "KV pages in use, 1: all", labels, used)
    pages = {"block_size": str(snapshot.page_size), "num_gpu_blocks": str(total)}
    yield _gauge("cache_config_info", "KV pages: tokens of one, and their number", labels | pages, 1)
    if slots:
        used_by = {
            "max_lora": str(slots),
            "running_lora_adapters": ",".join(row[0] for row in rows if row[2]),
            "waiting_lora_adapters": ",".join(row[0] for row in rows if row[3]),
        }
        text = "Adapters of running and of waiting sequences; the time now, in seconds since 1970"
        yield _gauge("lora_requests_info", text, used_by, now)


HISTOGRAMS: Mapping[str, tuple[str, ...]] = {
    "paceline_scheduler_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "paceline_scheduler_inter_token_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",  # as it was called before
    ),
}
"""vLLM's names of histograms, by ours."""


def histograms(model: str, ours: Iterable[Metric]) -> Iterator[Metric]:
    """Those of HISTOGRAMS, under vLLM's names."""
    for metric in ours:
        for name in HISTOGRAMS[metric.name]:
            alias = Metric(name, metric.documentation, "histogram")
            for sample in metric.samples:
                suffix = sample.name.removeprefix(metric.name)
                if suffix != "_created":
                    alias.add_sample(name + suffix, {"model_name": model, **sample.labels}, sample.value)
            yield alias


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
