"""Spans of steps whose scheduler records them. Imported only where they are on: it imports OpenTelemetry."""

from __future__ import annotations

import asyncio
import time

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from executor_service.contract.plan import StepPlan, StepResult

_PROPAGATOR = TraceContextTextMapPropagator()


class StepSpans:
    """A SERVER span for each step with a `traceparent`, from its arrival at the device's queue to its end."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("paceline.executor")

    def step_done(self, traceparent: str, answer: asyncio.Future[tuple[StepPlan, StepResult]]) -> None:
        """The step was computed or abandoned. traceparent: of its header; an invalid one is ignored."""
        now_ns = time.time_ns()
        context = _PROPAGATOR.extract({"traceparent": traceparent}, Context())
        if not get_current_span(context).get_span_context().is_valid:
            return
        failed = answer.cancelled() or answer.exception() is not None
        began_ns, attributes = now_ns, dict[str, int | float]()
        if not failed:
            result = answer.result()[1]
            began_ns -= 1000 * (result.queue_us + result.compute_us)
            attributes = {
                "paceline.step.rows": len(result.rows),
                "paceline.step.queue_seconds": 1e-6 * result.queue_us,
                "paceline.step.compute_seconds": 1e-6 * result.compute_us,
            }
        span = self._tracer.start_span("step", context, SpanKind.SERVER, attributes, start_time=began_ns)
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(now_ns)
