"""The tables of metrics in docs/operations.md, made from the registries.

usage: python -m tests.unit.docs.metrics_table
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client.core import Metric

from executor_service.adapters.registry import LoadedAdapter
from executor_service.adapters.weights import AdapterWeights
from executor_service.config import ExecutorConfig
from executor_service.contract.plan import Reason
from executor_service.rpc.metrics import Metrics as ExecutorMetrics
from executor_service.runtime.runtime import Runtime
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.events import CompletionUsage
from scheduler_service.core.scheduler import StepScheduler
from scheduler_service.core.snapshot import Share
from scheduler_service.metrics.metrics import Telemetry
from scheduler_service.model import ServedAdapter

_HEAD = ("| metric | type | labels | |", "|---|---|---|---|")
_IMPLIED = {"le"}  # of every histogram


def table(families: Iterable[Metric]) -> str:
    """One line for each family but `process_*`, by name. Each must have a sample, which tells its labels."""
    ours = (family for family in families if not family.name.startswith("process_"))
    return "\n".join((*_HEAD, *(_line(family) for family in sorted(ours, key=lambda one: one.name))))


def _line(family: Metric) -> str:
    assert family.samples, f"{family.name} has no sample, so its labels are unknown"
    labels = sorted({label for sample in family.samples for label in sample.labels} - _IMPLIED)
    name = f"{family.name}_total" if family.type == "counter" else family.name
    named = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {named} | {family.documentation} |"


def scheduler_table() -> str:
    """Of a scheduler to which everything has happened once."""
    metrics, core = Telemetry(), StepScheduler(CoreConfig())
    metrics.show(core.snapshot(), [Share("alice", requests=1, refused=0, tokens=1, running=0, queued=0)])
    metrics.rejections.labels("QUEUE_FULL").inc()
    metrics.genai.ended("chat", "", 1.0, [CompletionUsage(1, 0, 2, 0, 0, 0, 0.0, 0.5, 1.0)])
    metrics.call_failed("Generate", "QUEUE_FULL")
    metrics.drafted.labels(1).inc()
    metrics.accepted.labels(1).inc()
    metrics.executor_ready.labels("127.0.0.1:50061").set(1)
    adapter = ServedAdapter("name", "path", b"fingerprint", 4, 1)
    metrics.adapters.show([adapter], {"name": 1}, {}, loads=1, unloads=0)
    return table(metrics.registry.collect())


def executor_table() -> str:
    """Of an executor that has loaded and refused something."""

    async def collect() -> str:
        settings = {"backend": "oracle", "pages": 16, "adapter_dir": "."}
        runtime = Runtime.from_config(ExecutorConfig.model_validate(settings))
        await runtime.load()
        try:
            runtime.loaded.engine.counters.refused[Reason.PAGES] += 1
            adapter = LoadedAdapter(AdapterWeights(b"", 1, 1.0, ()), None)
            runtime.loaded.engine.store.adapters.add("sql", adapter)
            metrics = ExecutorMetrics(runtime)
            metrics.call_failed("Drain", "PERMISSION")
            return table(metrics.registry.collect())
        finally:
            runtime.close()

    return asyncio.run(collect())


if __name__ == "__main__":
    print(f"### Of the scheduler\n\n{scheduler_table()}\n\n### Of the executor\n\n{executor_table()}")
