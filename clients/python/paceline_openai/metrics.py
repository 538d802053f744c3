"""The gateway's own metrics, for Prometheus. With PROMETHEUS_MULTIPROC_DIR, summed over its processes."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counts of one process, or of all that share a directory."""

    def __init__(self) -> None:
        self._shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "paceline_gateway_requests_total", "Answers, by endpoint and HTTP status; 499: the client left",
            ["endpoint", "status"], registry=registry,
        )  # fmt: skip
        self.duration = Histogram(
            "paceline_gateway_request_seconds", "From a request's head to the end of its answer",
            ["endpoint"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.live = Gauge(
            "paceline_gateway_live_requests", "Requests that are being answered", registry=registry,
            multiprocess_mode="livesum",
        )  # fmt: skip
        self.body_bytes = Counter(
            "paceline_gateway_body_bytes_total", "Bytes of bodies read", registry=registry
        )
        self.lost_spans = Counter(
            "paceline_gateway_spans_lost_total", "Spans that were not sent", registry=registry
        )

    def page(self) -> bytes:
        """All of them, as text."""
        registry = self._registry
        if self._shared:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
