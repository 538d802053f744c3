"""Spans of this process, sent by OTLP over gRPC. Imported only where they are on: it imports OpenTelemetry.

OpenTelemetry's own variables say where to and how: OTEL_EXPORTER_OTLP_*, OTEL_TRACES_SAMPLER(_ARG),
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_SCHEDULE_DELAY and _MAX_EXPORT_BATCH_SIZE.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from service_kit.logs import Log

log = Log(__name__)

MAX_WAITING = 4096
"""Ended spans that are not sent yet; further ones are lost."""
CLOSE_S = 1.0
"""For the last spans at the process's end."""


class SpanSender(Collector):
    """Sends ended spans from a thread of its own, which nothing waits for; counts those that are lost."""

    def __init__(self, service: str) -> None:
        """service: its name at the receiver, unless OTEL_SERVICE_NAME has one."""
        self._prefix = service.replace("-", "_")
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # losses are counted, and logged here
        self._exporter = _Counted(OTLPSpanExporter())
        resource = Resource({"service.name": service}).merge(OTELResourceDetector().detect())
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(_Bounded(self._exporter))

    @property
    def lost(self) -> int:
        """Spans that were not sent: the receiver could not be reached, or not as fast as they came."""
        return self._exporter.lost

    def tell_losses(self, tell: Callable[[int], object]) -> None:
        """From now on call this with the number of spans that were lost, from any thread."""
        self._exporter.tell = tell

    def collect(self) -> Iterator[Metric]:
        """The count of lost spans, for a scrape."""
        yield CounterMetricFamily(f"{self._prefix}_spans_lost", "Spans that were not sent", value=self.lost)

    def close(self) -> None:
        """Send what is left, for at most CLOSE_S and a moment."""
        sending = threading.Thread(target=self.provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(CLOSE_S)
        if sending.is_alive():
            self._exporter.shutdown()
            sending.join(CLOSE_S)


class _Counted(SpanExporter):
    """An exporter whose spans are counted, from the end of a span to that of its sending."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._counting = threading.Lock()
        self._waiting = 0
        self._is_down = False
        self.lost = 0
        self.tell: Callable[[int], object] = lambda _: None  # of losses

    def takes(self) -> bool:
        """Count a span in, unless there are too many."""
        with self._counting:
            is_full = self._waiting >= MAX_WAITING
            self._waiting += not is_full
        self._lose(int(is_full))
        return not is_full

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch, with retries for OTEL_EXPORTER_OTLP_TIMEOUT seconds. Called by one thread."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            failed = result is not SpanExportResult.SUCCESS
            with self._counting:
                self._waiting -= len(spans)
            self._lose(len(spans) * failed)
            if failed != self._is_down:
                self._is_down = failed
                tell = log.warning if failed else log.info
                tell("spans are lost" if failed else "spans are sent again", lost=self.lost)
        return result

    def _lose(self, spans: int) -> None:
        if spans:
            with self._counting:
                self.lost += spans
            self.tell(spans)

    def shutdown(self) -> None:
        """End the sending that is under way."""
        self._exporter.shutdown()


class _Bounded(BatchSpanProcessor):
    """Batches of the spans that the exporter takes; so its own queue, which counts nothing, is never full."""

    def __init__(self, exporter: _Counted) -> None:
        super().__init__(exporter, max_queue_size=2 * MAX_WAITING)
        self._takes = exporter.takes

    def on_end(self, span: ReadableSpan) -> None:
        """Queue an ended span."""
        if span.context is not None and span.context.trace_flags.sampled and self._takes():
            super().on_end(span)
