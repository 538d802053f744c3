"""Spans of requests and steps. Import this only where they are on: it imports OpenTelemetry.

A request has a SERVER span, from its call's arrival to its end, with a child for each stay of each of its
sequences: queue, prefill, decode, preempted, failover. The children are made of the core's courses when the
call ends: the core knows nothing of spans. Names are those of the RPC and GenAI conventions, and vLLM's
`gen_ai.latency.*`; what they lack is `paceline.*`. No span has texts, identities or adapters.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from scheduler_service.core.waiting.course import Course, Stage, Stay
from scheduler_service.traced_call import Metadata, TracedCall

MAX_SEQUENCES = 16
"""Completions or inputs of one request that have children."""
MAX_LINKS = 128
"""Requests of a step that its span is linked to."""
_KEYS = ("traceparent", "tracestate")
_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that count as errors of a server, by the RPC convention."""
_PROPAGATOR = TraceContextTextMapPropagator()


class Spans:
    """Makes the spans of one scheduler. step_share: of the steps that have one, 0 to 1."""

    def __init__(self, provider: TracerProvider, step_share: float) -> None:
        self._tracer = provider.get_tracer("paceline.scheduler")
        self._step_share = step_share
        self._unanswered: deque[Span | None] = deque()  # steps; None: without a span
        self._offset_ns = time.time_ns() - round(1e9 * time.monotonic())

    # -- calls -----------------------------------------------------------------------------------

    def begin(self, method: str, metadata: Metadata) -> TracedCall | None:
        """See `CallTracer`. The caller's `traceparent` is the parent, and says whether spans are recorded."""
        carrier = {key: value for key, value in metadata if key in _KEYS and isinstance(value, str)}
        span = self._tracer.start_span(
            method,
            _PROPAGATOR.extract(carrier, Context()),
            SpanKind.SERVER,
            {"rpc.system.name": "grpc", "rpc.method": method},
            start_time=self._ns(time.monotonic()),
        )
        return TracedCall(span) if span.is_recording() else None

    def end(self, call: TracedCall) -> None:
        """End a call's span, with its children."""
        now, span = time.monotonic(), call.span
        assert isinstance(span, Span)
        context = set_span_in_context(span, Context())
        for index, course in enumerate(call.courses[:MAX_SEQUENCES]):
            for stay in course:
                self._child(context, index, stay)
        span.set_attributes(call.attributes)
        if call.courses:
            span.set_attribute("paceline.sequences", len(call.courses))
            span.set_attributes(_latencies(call.courses[0]))
        span.set_attribute("rpc.response.status_code", call.code or "OK")
        if call.code:
            span.set_attribute("error.type", call.reason)
        if call.code in _FAULTS:
            span.set_status(StatusCode.ERROR, call.reason)
        span.end(self._ns(now))

    def _child(self, context: Context, index: int, stay: Stay) -> None:
        attributes: dict[str, str | int | list[str] | list[float]] = {"paceline.sequence": index}
        if stay.waits:
            longest = max(stay.waits, key=lambda one: one[1])
            attributes["paceline.wait.reason"] = longest[0].name.lower()
            attributes["paceline.wait.reasons"] = [reason.name.lower() for reason, _ in stay.waits]
            attributes["paceline.wait.seconds"] = [seconds for _, seconds in stay.waits]
        child = self._tracer.start_span(
            stay.stage.value, context, attributes=attributes, start_time=self._ns(stay.began)
        )
        child.end(self._ns(stay.ended))

    # -- steps -----------------------------------------------------------------------------------

    def step_planned(self, requests: Callable[[], Iterable[TracedCall]], now: float) -> str:
        """A step is sent next; returns the traceparent for its header, "" if it has no span.

        requests: those that it computes, asked for if it has one.
        """
        if random.random() >= self._step_share:
            self._unanswered.append(None)
            return ""
        contexts = [call.span.get_span_context() for call in requests() if isinstance(call.span, Span)]
        links = [Link(context) for context in contexts[:MAX_LINKS]]
        at_ns = self._ns(now)
        span = self._tracer.start_span("step", Context(), SpanKind.CLIENT, links=links, start_time=at_ns)
        self._unanswered.append(span)
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        return carrier.get("traceparent", "")  # OTEL_SDK_DISABLED makes spans without an id

    def step_answered(self, now: float, rows: int) -> None:
        """The oldest step was."""
        if (span := self._unanswered.popleft()) is not None:
            span.set_attribute("paceline.step.rows", rows)
            span.end(self._ns(now))

    def steps_lost(self, now: float) -> None:
        """Those that were sent will never be answered."""
        while self._unanswered:
            if (span := self._unanswered.popleft()) is not None:
                span.set_attribute("error.type", "EXECUTOR_LOST")
                span.set_status(StatusCode.ERROR, "EXECUTOR_LOST")
                span.end(self._ns(now))

    def _ns(self, seconds: float) -> int:
        """Nanoseconds since 1970."""
        return round(1e9 * seconds) + self._offset_ns


def _latencies(course: Course) -> dict[str, float]:
    """Seconds by vLLM's names: of the first sequence, with those of later stays of the same kind."""
    spent = dict.fromkeys(Stage, 0.0)
    for stay in course:
        spent[stay.stage] += stay.ended - stay.began
    return {
        "gen_ai.latency.time_in_queue": spent[Stage.QUEUE],
        "gen_ai.latency.time_in_model_prefill": spent[Stage.PREFILL],
        "gen_ai.latency.time_in_model_decode": spent[Stage.DECODE],
    }
